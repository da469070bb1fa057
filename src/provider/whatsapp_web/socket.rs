//! The connection to WhatsApp: a WebSocket of bytes. What is in it is encrypted once more, by the
//! client's own handshake.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt, stream::SplitSink, stream::SplitStream};
use hyper::header::{HeaderValue, ORIGIN};
use hyper::{Method, Uri};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use whatsapp_rust::http::{HttpClient, HttpRequest, HttpResponse};
use whatsapp_rust::transport::{DisconnectReason, Transport, TransportEvent, TransportFactory};
use whatsapp_rust::wacore::net::WHATSAPP_WEB_ORIGIN;
use whatsapp_rust::{anyhow, async_channel, async_trait};

use crate::provider::encrypted::{self, Io};
use crate::provider::outward::Outward;

/// The longest that connecting may take, and that the other side may take to read what is sent.
const PATIENCE: Duration = Duration::from_secs(10);
/// The largest frame: what the protocol's three bytes of length can say.
const FRAME_BYTES_MAX: usize = 1 << 24;
/// Events that may wait for the client to read them.
const EVENTS_MAX: usize = 1024;

type Stream = WebSocketStream<Box<dyn Io>>;

/// Makes connections to one address.
pub(super) struct Sockets {
    pub(super) url: String,
}

struct Socket {
    sink: tokio::sync::Mutex<SplitSink<Stream, Message>>,
    reading: tokio::task::AbortHandle,
}

async fn in_time<T>(doing: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    match tokio::time::timeout(PATIENCE, doing).await {
        Ok(done) => done,
        Err(_elapsed) => Err(anyhow::anyhow!("WhatsApp did nothing within {PATIENCE:?}")),
    }
}

async fn open(url: &str) -> anyhow::Result<Stream> {
    let uri: Uri = url.parse()?;
    let encrypted = match uri.scheme_str() {
        Some("wss") => true,
        Some("ws") => false,
        _ => anyhow::bail!("{url:?} is no address of a WebSocket"),
    };
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let port = uri.port_u16().unwrap_or(if encrypted { 443 } else { 80 });
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    let stream: Box<dyn Io> = Box::new(stream);
    let stream = if encrypted { encrypted::over(stream, host, &[]).await? } else { stream };
    let mut request = url.into_client_request()?;
    request.headers_mut().insert(ORIGIN, HeaderValue::from_static(WHATSAPP_WEB_ORIGIN));
    let config = WebSocketConfig::default()
        .max_message_size(Some(FRAME_BYTES_MAX))
        .max_frame_size(Some(FRAME_BYTES_MAX));
    let upgraded = tokio_tungstenite::client_async_with_config(request, stream, Some(config));
    Ok(upgraded.await?.0)
}

#[async_trait]
impl TransportFactory for Sockets {
    async fn create_transport(
        &self,
    ) -> anyhow::Result<(Arc<dyn Transport>, async_channel::Receiver<TransportEvent>)> {
        let (sink, stream) = in_time(open(&self.url)).await?.split();
        let (events, heard) = async_channel::bounded(EVENTS_MAX);
        let reading = tokio::spawn(reading(stream, events)).abort_handle();
        Ok((Arc::new(Socket { sink: sink.into(), reading }), heard))
    }
}

/// Passes on what comes, until it ends or nobody listens.
async fn reading(mut stream: SplitStream<Stream>, events: async_channel::Sender<TransportEvent>) {
    if events.send(TransportEvent::Connected).await.is_err() {
        return;
    }
    let reason = loop {
        match stream.next().await {
            Some(Ok(Message::Binary(bytes))) => {
                if events.send(TransportEvent::DataReceived(bytes)).await.is_err() {
                    return;
                }
            }
            Some(Ok(Message::Close(frame))) => {
                let code = frame.as_ref().map(|frame| frame.code.into());
                let reason = frame.map(|frame| frame.reason.to_string()).unwrap_or_default();
                break DisconnectReason::ServerClose { code, reason };
            }
            // Pings are answered by the library; WhatsApp sends no text.
            Some(Ok(_)) => {}
            Some(Err(error)) => break DisconnectReason::ReadError(error.to_string()),
            None => break DisconnectReason::StreamEnded,
        }
    };
    // Nobody may listen any more.
    let _ = events.send(TransportEvent::Disconnected(reason)).await;
}

#[async_trait]
impl Transport for Socket {
    async fn send(&self, data: Bytes) -> anyhow::Result<()> {
        in_time(async { Ok(self.sink.lock().await.send(Message::Binary(data)).await?) }).await
    }

    async fn disconnect(&self) {
        // It may be dead already, and is dropped whatever becomes of this.
        let _ = in_time(async { Ok(self.sink.lock().await.close().await?) }).await;
        self.reading.abort();
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.reading.abort();
    }
}

/// HTTP for what the client asks outside its connection: which version of itself is current.
pub(super) struct Http(pub(super) Outward);

#[async_trait]
impl HttpClient for Http {
    async fn execute(&self, request: HttpRequest) -> anyhow::Result<HttpResponse> {
        if request.method != Method::GET.as_str() {
            // Media, which this provider neither loads nor sends.
            return Err(io::Error::from(io::ErrorKind::Unsupported).into());
        }
        let headers: Vec<(&str, &str)> =
            request.headers.iter().map(|(name, value)| (&**name, &**value)).collect();
        let answer = self.0.call(Method::GET, &request.url, &headers, None, PATIENCE).await?;
        Ok(HttpResponse { status_code: answer.status, body: answer.body.to_vec() })
    }
}
