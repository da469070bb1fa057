//! The asking end of a simulated connection.

use std::sync::Arc;

use axum::body::Bytes;
use axum::http;
use futures_util::StreamExt;
use tokio::sync::mpsc;

use super::network::{Net, Part};
use crate::raft::way::Lost;

/// Hangs up however the asking ends.
struct Open {
    net: Arc<Net>,
    exchange: u64,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.net.hang_up(self.exchange);
    }
}

/// Sends a request from a host.
pub(super) async fn send(
    net: &Arc<Net>,
    host: usize,
    request: reqwest::Request,
) -> Result<reqwest::Response, Lost> {
    let within = request.timeout().copied();
    let (exchange, mut parts) = net.ask(host, &request)?;
    let open = Open { net: net.clone(), exchange };
    let first = match within {
        Some(within) => tokio::time::timeout(within, parts.recv())
            .await
            .map_err(|_| Lost::Timeout("operation timed out".to_owned()))?,
        None => parts.recv().await,
    };
    match first {
        Some(Part::Head { status, headers, whole }) => {
            let body = match whole {
                Some(bytes) => reqwest::Body::from(bytes),
                None => reqwest::Body::wrap_stream(rest(parts, open)),
            };
            let mut response = http::Response::new(body);
            *response.status_mut() = status;
            *response.headers_mut() = headers;
            Ok(response.into())
        }
        Some(Part::Refused) => Err(Lost::Refused("connection refused".to_owned())),
        Some(Part::Unreachable) => Err(Lost::Connect("no connection in time".to_owned())),
        Some(Part::Reset) | None => Err(Lost::Broken("connection reset by peer".to_owned())),
        Some(Part::Chunk(_) | Part::End) => Err(Lost::Broken("an answer without head".to_owned())),
    }
}

/// What follows the head.
fn rest(
    parts: mpsc::UnboundedReceiver<Part>,
    open: Open,
) -> impl futures_util::Stream<Item = std::io::Result<Bytes>> + Send {
    futures_util::stream::unfold(Some((parts, open)), |state| async move {
        let (mut parts, open) = state?;
        match parts.recv().await {
            Some(Part::Chunk(bytes)) => Some((Ok(bytes), Some((parts, open)))),
            Some(Part::End) => None,
            _ => {
                let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
                Some((Err(reset), None))
            }
        }
    })
    .boxed()
}
