//! The answering end: requests go to the node's own router.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http;
use http_body_util::BodyExt;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tower::ServiceExt;

use super::network::{Incoming, Net, Part};

/// Answers what comes to a host, until nothing can come any more.
pub(crate) async fn serve(
    net: Arc<Net>,
    host: usize,
    router: Router,
    mut inbox: mpsc::UnboundedReceiver<Incoming>,
) {
    let mut running: BTreeMap<u64, AbortHandle> = BTreeMap::new();
    while let Some(incoming) = inbox.recv().await {
        match incoming {
            Incoming::Request { exchange, request, counts } => {
                running.retain(|_, task| !task.is_finished());
                let exchange = counts.then_some(exchange);
                let answering = answer(net.clone(), host, router.clone(), exchange, *request);
                let task = tokio::spawn(answering).abort_handle();
                if let Some(exchange) = exchange {
                    running.insert(exchange, task);
                }
            }
            // A handler goes with the connection of whoever asked.
            Incoming::HungUp { exchange } => {
                if let Some(task) = running.remove(&exchange) {
                    task.abort();
                }
            }
        }
    }
}

async fn answer(
    net: Arc<Net>,
    host: usize,
    router: Router,
    exchange: Option<u64>,
    request: http::Request<Bytes>,
) {
    let response = match router.oneshot(request.map(Body::from)).await {
        Ok(response) => response,
        Err(never) => match never {},
    };
    let (head, mut body) = response.into_parts();
    // The answer to what came twice is sent once.
    let Some(exchange) = exchange else { return };
    let part = |whole| Part::Head { status: head.status, headers: head.headers.clone(), whole };
    if body.size_hint().exact().is_some() {
        if let Ok(whole) = body.collect().await {
            net.answer(host, exchange, part(Some(whole.to_bytes())));
        }
        return;
    }
    net.answer(host, exchange, part(None));
    while let Some(frame) = body.frame().await {
        match frame.map(|frame| frame.into_data()) {
            Ok(Ok(bytes)) => net.answer(host, exchange, Part::Chunk(bytes)),
            Ok(Err(_)) => {}
            Err(_) => return net.answer(host, exchange, Part::Reset),
        }
    }
    net.answer(host, exchange, Part::End);
}
