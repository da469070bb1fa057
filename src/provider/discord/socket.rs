//! A connection to the gateway: JSON in, JSON out.

use std::io;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use hyper::Uri;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, WebSocketConfig};
use tokio_tungstenite::tungstenite::{self, Message};

use crate::provider::encrypted::{self, Io};

/// The longest that connecting may take, and that the other side may take to read what is sent.
const PATIENCE: Duration = Duration::from_secs(10);
/// The largest event read: a guild with all that it holds has megabytes.
const EVENT_BYTES_MAX: usize = 64 * 1024 * 1024;
/// A close under which Discord keeps the session, unlike 1000 and 1001.
const KEEPS_SESSION: u16 = 4_000;

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("the gateway is at {0:?}, which is no address to connect to")]
    Address(String),
    #[error("the gateway is out of reach: {0}")]
    Io(#[from] io::Error),
    #[error("the connection to the gateway failed: {0}")]
    Socket(#[from] Box<tungstenite::Error>),
    #[error("the gateway did nothing within {PATIENCE:?}")]
    Silent,
}

/// What comes from the gateway.
#[derive(Debug)]
pub(super) enum Said {
    /// A payload.
    Payload(Value),
    /// Something that is none.
    Foreign,
    /// It ends the connection, with this code.
    Closed(Option<u16>),
}

pub(super) struct Socket {
    stream: WebSocketStream<Box<dyn Io>>,
}

async fn in_time<T, E: Into<Fault>>(doing: impl Future<Output = Result<T, E>>) -> Result<T, Fault> {
    match tokio::time::timeout(PATIENCE, doing).await {
        Ok(done) => done.map_err(Into::into),
        Err(_elapsed) => Err(Fault::Silent),
    }
}

impl Socket {
    /// Connects; in plain text only where that is allowed.
    pub(super) async fn open(url: &str, plain: bool) -> Result<Self, Fault> {
        let url = format!("{}/?v=10&encoding=json", url.trim_end_matches('/'));
        let uri = url.parse::<Uri>().ok();
        let parts = uri.as_ref().and_then(|uri| {
            let encrypted = match uri.scheme_str()? {
                "wss" => true,
                "ws" if plain => false,
                _ => return None,
            };
            let host = uri.host()?.trim_start_matches('[').trim_end_matches(']');
            let port = uri.port_u16().unwrap_or(if encrypted { 443 } else { 80 });
            Some((encrypted, host, port))
        });
        let Some((encrypted, host, port)) = parts else { return Err(Fault::Address(url)) };
        let stream = in_time(async {
            let stream = TcpStream::connect((host, port)).await?;
            stream.set_nodelay(true)?;
            let stream: Box<dyn Io> = Box::new(stream);
            if encrypted { encrypted::over(stream, host, &[]).await } else { Ok(stream) }
        });
        let stream = stream.await?;
        let config = WebSocketConfig::default()
            .max_message_size(Some(EVENT_BYTES_MAX))
            .max_frame_size(Some(EVENT_BYTES_MAX));
        let upgraded = tokio_tungstenite::client_async_with_config(&url, stream, Some(config));
        let (stream, _) = in_time(async { upgraded.await.map_err(Box::new) }).await?;
        Ok(Self { stream })
    }

    /// What comes next. Nothing is lost where the caller does not wait for it to the end.
    pub(super) async fn next(&mut self) -> Result<Said, Fault> {
        loop {
            return match self.stream.next().await {
                Some(Ok(Message::Text(text))) => Ok(match serde_json::from_str(&text) {
                    Ok(payload) => Said::Payload(payload),
                    Err(_) => Said::Foreign,
                }),
                Some(Ok(Message::Close(frame))) => {
                    Ok(Said::Closed(frame.map(|frame| frame.code.into())))
                }
                None => Ok(Said::Closed(None)),
                Some(Ok(Message::Binary(_))) => Ok(Said::Foreign),
                // Answered by the library.
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => continue,
                Some(Err(error)) => Err(Box::new(error).into()),
            };
        }
    }

    /// What comes first, which does not take long.
    pub(super) async fn first(&mut self) -> Result<Said, Fault> {
        in_time(self.next()).await
    }

    pub(super) async fn send(&mut self, payload: &Value) -> Result<(), Fault> {
        let message = Message::text(payload.to_string());
        in_time(async { self.stream.send(message).await.map_err(Box::new) }).await
    }

    /// Ends the connection, and not the session.
    pub(super) async fn close(mut self) {
        let code = CloseCode::from(KEEPS_SESSION);
        let frame = CloseFrame { code, reason: "resuming".into() };
        // It may be dead already, and is dropped whatever becomes of this.
        let _ = in_time(async { self.stream.close(Some(frame)).await.map_err(Box::new) }).await;
    }
}
