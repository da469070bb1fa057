//! A listener with bounds.
//!
//! Problem: whoever can reach a port can open connections without end, send headers a byte a
//! minute, or keep a stopping process alive with one open stream. Idea: own accept loop over
//! hyper's HTTP/1 connection, which bounds the size and number of headers and the time they take
//! (`axum::serve` bounds none of them), one permit a connection, and a stop in two steps:
//! connections are told to finish, then after [`Limits::grace`] they are dropped.
//!
//! Invariants: at most [`Limits::connections_max`] connections are open; every connection's task
//! is owned and awaited by [`serve`]; when `serve` returns, none is left.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

/// The bounds of a listener (SPEC K5, M3).
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Open connections; further ones wait in the kernel's queue.
    pub connections_max: usize,
    /// Bytes of a request's head. More → 431.
    pub head_bytes_max: usize,
    /// Headers of a request. More → 431.
    pub headers_max: usize,
    /// How long a request's head may take, and how long a connection may idle between two.
    pub head_time_max: Duration,
    /// How long open requests may go on once the listener stops.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 8_192,
            head_bytes_max: 64 * 1024,
            headers_max: 100,
            head_time_max: Duration::from_secs(60),
            grace: Duration::from_secs(5),
        }
    }
}

/// After an accept that failed for want of descriptors or memory: only time helps.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until `stop`, then finishes what is open within the grace.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    limits: Limits,
    stop: CancellationToken,
) -> io::Result<()> {
    let permits = Arc::new(Semaphore::new(limits.connections_max));
    let builder = connection_builder(limits);
    let mut open = JoinSet::new();
    // A child, so that dropping this future stops its connections and no others.
    let finish = stop.child_token();
    let guard = finish.clone().drop_guard();
    loop {
        let permit = tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = open.join_next() => continue,
            permit = permits.clone().acquire_owned() => match permit {
                Ok(permit) => permit,
                // Never closed; if it were, nothing more could be accepted.
                Err(closed) => return Err(io::Error::other(closed)),
            },
        };
        let stream = tokio::select! {
            () = stop.cancelled() => break,
            accepted = accept(&listener) => accepted?,
        };
        let connection = connection(stream, app.clone(), builder.clone(), finish.clone());
        open.spawn(async move {
            connection.await;
            drop(permit);
        });
    }
    // Refuse newcomers at once instead of letting them wait for a process that goes.
    drop(listener);
    let all_done = async { while open.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.grace, all_done).await.is_err() {
        tracing::warn!(left = open.len(), grace = ?limits.grace, "connections dropped at stop");
        open.shutdown().await;
    }
    drop(guard);
    Ok(())
}

/// The next connection; waits out what only time mends.
async fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return Ok(stream),
            Err(error) => match error.kind() {
                // The peer went between its knock and our accept.
                io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset => {}
                io::ErrorKind::InvalidInput => return Err(error),
                _ => {
                    tracing::warn!(%error, "accept failed; trying again");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
}

fn connection_builder(limits: Limits) -> hyper::server::conn::http1::Builder {
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time_max)
        .max_headers(limits.headers_max)
        // hyper takes no buffer under 8 KiB.
        .max_buf_size(limits.head_bytes_max.max(8 * 1024));
    builder
}

/// One connection, from accept to close.
fn connection(
    stream: TcpStream,
    app: Router,
    builder: hyper::server::conn::http1::Builder,
    finish: CancellationToken,
) -> impl Future<Output = ()> {
    // Answers are small and somebody waits for each.
    let _ = stream.set_nodelay(true);
    let service = TowerToHyperService::new(
        app.map_request(|request: hyper::Request<Incoming>| request.map(Body::new)),
    );
    async move {
        let serving = builder.serve_connection(TokioIo::new(stream), service);
        tokio::pin!(serving);
        let ended = tokio::select! {
            ended = serving.as_mut() => ended,
            () = finish.cancelled() => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
        };
        if let Err(error) = ended {
            tracing::trace!(%error, "connection ended");
        }
    }
}
