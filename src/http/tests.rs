//! The listeners as their callers meet them: over real sockets where sockets matter.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::Request;
use axum::routing::get;
use futures_util::StreamExt;
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::cluster::{self, Parts, Probe};
use super::listen::{Limits, serve};
use super::metrics::Text;
use super::public::{WEBHOOK_BYTES_MAX, Webhooks, webhooks};
use super::{coordination, webchat};
use crate::group::{Group, MemoryHub};
use crate::machine::{Authority, Reply};
use crate::machine::{Command, Op, Outgoing};
use crate::provider::{
    DeliverError, Delivered, Inbox, Link, Notice, Webhook, WebhookRequest, WebhookResponse,
};
use crate::raft::Secret;
use crate::store::{GroupStore, RekeyError, Store, Taken};
use crate::types::{ChatKey, Message, Prefix};

// --- a listener ------------------------------------------------------------------------------

async fn listen(app: Router, limits: Limits) -> (String, CancellationToken, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let stop = CancellationToken::new();
    let ended = stop.clone();
    let task = tokio::spawn(async move { serve(listener, app, limits, ended).await.unwrap() });
    (address, stop, task)
}

async fn raw(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // A connection that is cut is an answer too.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn k5_m3_heads_are_bounded_in_size_number_and_time() {
    let limits = Limits {
        head_bytes_max: 8 * 1024,
        headers_max: 10,
        head_time_max: Duration::from_millis(200),
        ..Limits::default()
    };
    let app = Router::new().route("/", get(async || "fine"));
    let (address, stop, task) = listen(app, limits).await;
    let head = "GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
    let fine = raw(&address, &format!("{head}\r\n")).await;
    assert!(fine.starts_with("HTTP/1.1 200"), "{fine}");
    let large = raw(&address, &format!("{head}x: {}\r\n\r\n", "y".repeat(20_000))).await;
    assert!(large.starts_with("HTTP/1.1 431"), "{large}");
    let many: String = (0..20).map(|n| format!("x-{n}: y\r\n")).collect();
    let many = raw(&address, &format!("{head}{many}\r\n")).await;
    assert!(many.starts_with("HTTP/1.1 431"), "{many}");
    // A head that never ends is cut: the read returns.
    let slow = tokio::time::timeout(Duration::from_secs(10), raw(&address, head)).await.unwrap();
    assert!(!slow.starts_with("HTTP/1.1 200"), "{slow}");
    stop.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn k5_connections_are_bounded_and_the_next_waits_its_turn() {
    let limits = Limits { connections_max: 1, ..Limits::default() };
    let app = Router::new().route("/", get(async || "fine"));
    let (address, stop, task) = listen(app, limits).await;
    let mut first = TcpStream::connect(&address).await.unwrap();
    first.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut byte = [0];
    first.read_exact(&mut byte).await.unwrap();
    // The second is connected by the kernel and not served while the first is open.
    let request = "GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let mut second = Box::pin(raw(&address, request));
    let early = tokio::time::timeout(Duration::from_millis(100), second.as_mut()).await;
    assert!(early.is_err(), "served beside the first: {early:?}");
    drop(first);
    assert!(second.await.starts_with("HTTP/1.1 200"));
    stop.cancel();
    task.await.unwrap();
}

#[tokio::test]
async fn a7_a_stop_finishes_what_is_open_and_drops_what_hangs() {
    let go = Arc::new(tokio::sync::Notify::new());
    let waits = go.clone();
    let app = Router::new()
        .route(
            "/slow",
            get(async move || {
                waits.notified().await;
                "done"
            }),
        )
        .route("/hangs", get(std::future::pending::<&'static str>));
    let limits = Limits { grace: Duration::from_millis(500), ..Limits::default() };
    let (address, stop, task) = listen(app, limits).await;
    let request = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
    let (slow, hangs) = (request("/slow"), request("/hangs"));
    let (at, to) = (address.clone(), address.clone());
    let slow = tokio::spawn(async move { raw(&at, &slow).await });
    let hangs = tokio::spawn(async move { raw(&to, &hangs).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    stop.cancel();
    go.notify_one();
    assert!(slow.await.unwrap().ends_with("done"));
    assert_eq!(hangs.await.unwrap(), "");
    task.await.unwrap();
    assert!(TcpStream::connect(&address).await.is_err(), "it still accepts");
}

// --- the cluster listener --------------------------------------------------------------------

struct Health(Result<(), String>);

impl Probe for Health {
    fn ready(&self) -> Result<(), String> {
        self.0.clone()
    }
    fn measure(&self, text: &mut Text) {
        text.gauge("botmesh_raft_term", "The Raft term", 7);
    }
}

async fn ask(app: &Router, request: Request<Body>) -> (u16, axum::http::HeaderMap, String) {
    let response = app.clone().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    (parts.status.as_u16(), parts.headers, String::from_utf8_lossy(&bytes).into_owned())
}

fn plain(method: &str, path: &str) -> Request<Body> {
    Request::builder().method(method).uri(path).body(Body::empty()).unwrap()
}

fn cluster_app(ready: Result<(), String>) -> (Router, Secret) {
    let secret = Secret::random();
    let app = cluster::router(Parts {
        group: MemoryHub::new().as_group(),
        routes: Router::new().route("/cluster/status", get(async || "{}")),
        probe: Arc::new(Health(ready)),
        secret: secret.clone(),
        options: coordination::Options::default(),
        calls_max: 10,
    });
    (app, secret)
}

#[tokio::test]
async fn k5_everything_but_three_paths_demands_the_secret() {
    let (app, secret) = cluster_app(Ok(()));
    for path in ["/cluster/status", "/v1/openapi.json", "/v1/a/sessions", "/", "/livezz", "/livez/"]
    {
        let (status, headers, body) = ask(&app, plain("GET", path)).await;
        assert_eq!(status, 401, "{path}");
        assert_eq!(headers["www-authenticate"], "Bearer");
        assert!(body.contains("\"unauthorized\""), "{body}");
        let mut request = plain("GET", path);
        let wrong = format!("{}x", secret.bearer()).parse().unwrap();
        request.headers_mut().insert("authorization", wrong);
        assert_eq!(ask(&app, request).await.0, 401, "{path}");
        let mut request = plain("GET", path);
        request.headers_mut().insert("authorization", secret.bearer().parse().unwrap());
        assert_ne!(ask(&app, request).await.0, 401, "{path}");
    }
}

#[tokio::test]
async fn k7_the_open_paths_tell_life_readiness_and_figures() {
    let (app, _) = cluster_app(Ok(()));
    assert_eq!(ask(&app, plain("GET", "/livez")).await.0, 200);
    assert_eq!(ask(&app, plain("GET", "/readyz")).await.0, 200);
    let (status, headers, text) = ask(&app, plain("GET", "/metrics")).await;
    assert_eq!(
        (status, headers["content-type"].to_str().unwrap()),
        (200, super::metrics::CONTENT_TYPE)
    );
    for line in [
        "botmesh_raft_term 7",
        "botmesh_sessions 0",
        "botmesh_turns_held 0",
        "botmesh_http_requests_total{route=\"/livez\",method=\"GET\",status=\"200\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    let (app, secret) = cluster_app(Err("no quorum".into()));
    let (status, _, why) = ask(&app, plain("GET", "/readyz")).await;
    assert_eq!((status, &*why), (503, "not ready: no quorum\n"));
    assert_eq!(ask(&app, plain("GET", "/livez")).await.0, 200);
    for path in ["/v1/", "/nothing"] {
        let mut request = plain("GET", path);
        request.headers_mut().insert("authorization", secret.bearer().parse().unwrap());
        let (status, _, body) = ask(&app, request).await;
        assert_eq!(status, 404, "{path}");
        assert!(body.contains("no_such_route"), "{body}");
    }
}

// --- the public side -------------------------------------------------------------------------

struct Nobody;

#[async_trait]
impl Inbox for Nobody {
    async fn deliver(&self, messages: Vec<Message>) -> Result<Vec<Delivered>, DeliverError> {
        Ok(messages.iter().map(|_| Delivered { duplicate: false }).collect())
    }

    async fn rekey(&self, _: &ChatKey, _: &ChatKey, _: Taken) -> Result<(), RekeyError> {
        Ok(())
    }

    async fn deliver_past(
        &self,
        _: &str,
        messages: Vec<Message>,
        _: Vec<u8>,
    ) -> Result<Vec<Delivered>, DeliverError> {
        self.deliver(messages).await
    }

    async fn cursor(&self, _: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        Ok(None)
    }

    async fn keep(
        &self,
        _: &str,
        _: Vec<(String, Vec<u8>)>,
        _: Duration,
    ) -> Result<(), DeliverError> {
        Ok(())
    }

    async fn kept(&self, _: &str, _: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        Ok(None)
    }

    fn notice(&self, _: &str, _: Notice) {}

    fn connected(&self, _: &str, _: bool) {}
}

/// Answers what it was asked.
struct Echo;

#[async_trait]
impl Webhook for Echo {
    async fn handle(&self, request: WebhookRequest, _: &Link, _: &dyn Store) -> WebhookResponse {
        let said = format!(
            "{} {:?} {:?} {} bytes",
            request.method,
            request.path,
            request.query,
            request.body.len()
        );
        let headers = vec![("x-echo".to_owned(), "1".to_owned())];
        WebhookResponse { status: 202, headers, body: Bytes::from(said) }
    }
}

fn store() -> (MemoryHub, Arc<dyn Store>) {
    let hub = MemoryHub::new();
    let store = GroupStore::new(hub.as_group(), Prefix::new("shop").unwrap());
    (hub, Arc::new(store))
}

fn public_app() -> Router {
    let (_stop, closing) = tokio::sync::watch::channel(false);
    let link = Link::new(Arc::new(Nobody), closing);
    let hooks = [("demo".to_owned(), Arc::new(Echo) as Arc<dyn Webhook>)].into();
    Router::new().nest("/bot", webhooks(Webhooks { hooks, link, store: store().1 }))
}

#[tokio::test]
async fn l9_webhooks_nest_in_an_app_and_are_given_the_path_below_theirs() {
    let app = public_app();
    for (path, said) in [
        ("/bot/webhooks/demo?a=b", "GET \"\" \"a=b\" 0 bytes"),
        ("/bot/webhooks/demo/", "GET \"\" \"\" 0 bytes"),
        ("/bot/webhooks/demo/replies/x%20y", "GET \"replies/x y\" \"\" 0 bytes"),
    ] {
        let (status, headers, body) = ask(&app, plain("GET", path)).await;
        assert_eq!((status, &*body), (202, said));
        assert_eq!(headers["x-echo"], "1");
    }
    let (status, _, body) = ask(&app, plain("POST", "/bot/webhooks/other")).await;
    assert_eq!(status, 404);
    assert!(body.contains("no_such_route"));
}

#[tokio::test]
async fn m3_a_webhook_body_has_four_mebibytes() {
    let app = public_app();
    let post = |len: usize| {
        let body = Body::from(vec![b'x'; len]);
        Request::builder().method("POST").uri("/bot/webhooks/demo").body(body).unwrap()
    };
    let (status, _, body) = ask(&app, post(WEBHOOK_BYTES_MAX)).await;
    assert_eq!((status, &*body), (202, "POST \"\" \"\" 4194304 bytes"));
    let (status, _, body) = ask(&app, post(WEBHOOK_BYTES_MAX + 1)).await;
    assert_eq!(status, 413);
    assert!(body.contains("too_large"), "{body}");
}

/// Appends a reply to the chat's outbox as a turn's commit does.
async fn reply(hub: &MemoryHub, id: &str) {
    let send = Outgoing {
        id: id.to_owned(),
        in_reply_to: "m1".to_owned(),
        body: serde_json::to_vec(&serde_json::json!({ "text": format!("text of {id}") })).unwrap(),
        turn_seq: 0,
        deliver: false,
        keep: 1_000,
    };
    let prefix = Prefix::new("shop").unwrap();
    let ops = vec![Op::Send { prefix, chat: "webchat:ann".to_owned(), send }];
    let command = Command::Commit { by: Authority::Nobody, ops };
    let deadline = hub.clock().now() + Duration::from_secs(5);
    let done = hub.execute(command, deadline).await.unwrap();
    assert!(matches!(done, Reply::Committed(_)), "{done:?}");
}

fn chat_app(store: Arc<dyn Store>) -> (Router, CancellationToken) {
    let stop = CancellationToken::new();
    let nodes: Vec<webchat::Origin> =
        ["127.0.0.1:8101", "127.0.0.1:8102"].map(|node| node.parse().unwrap()).into();
    let options =
        webchat::Options { channel: "webchat".into(), nodes: nodes.clone(), stop: stop.clone() };
    (webchat::router(store, options).layer(webchat::cors(nodes)), stop)
}

/// The next text of the stream that holds `until`, everything before it included.
async fn read_until(stream: &mut axum::body::BodyDataStream, until: &str) -> String {
    let mut text = String::new();
    while !text.contains(until) {
        let piece = tokio::time::timeout(Duration::from_secs(10), stream.next()).await;
        let piece = piece.unwrap_or_else(|_| panic!("no {until:?} after {text:?}"));
        text.push_str(&String::from_utf8_lossy(&piece.expect("the stream goes on").unwrap()));
    }
    text
}

async fn open_stream(app: &Router, path: &str) -> axum::body::BodyDataStream {
    let response = app.clone().oneshot(plain("GET", path)).await.unwrap();
    assert_eq!(response.status().as_u16(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    response.into_body().into_data_stream()
}

#[tokio::test]
async fn d4_replies_are_pushed_in_order_and_go_on_after_a_number() {
    let (hub, store) = store();
    let (app, stop) = chat_app(store);
    reply(&hub, "a").await;
    let mut stream = open_stream(&app, "/webchat/events?chat=ann").await;
    let first = read_until(&mut stream, "text of a").await;
    assert!(first.contains("event: hello\nretry: 500\ndata: -\n\n"), "{first}");
    assert!(first.contains("id: 1\n"), "{first}");
    // Pushed: the stream was open before the reply was there.
    reply(&hub, "b").await;
    let second = read_until(&mut stream, "text of b").await;
    assert!(second.contains("id: 2\n") && !second.contains("text of a"), "{second}");

    // Another node goes on after the last one shown, in whichever way the page says it.
    let mut other = open_stream(&app, "/webchat/events?chat=ann&after=1").await;
    assert!(!read_until(&mut other, "text of b").await.contains("text of a"));
    let mut again = plain("GET", "/webchat/events?chat=ann&after=0");
    again.headers_mut().insert("last-event-id", "1".parse().unwrap());
    let response = app.clone().oneshot(again).await.unwrap();
    let mut again = response.into_body().into_data_stream();
    assert!(!read_until(&mut again, "text of b").await.contains("text of a"));

    // When the node stops the streams end, so that pages go elsewhere at once.
    stop.cancel();
    while let Some(piece) = stream.next().await {
        piece.unwrap();
    }
}

#[tokio::test]
async fn m3_a_long_list_of_replies_comes_whole() {
    let (hub, store) = store();
    let (app, _stop) = chat_app(store);
    for number in 1..=250 {
        reply(&hub, &format!("r{number}.")).await;
    }
    let mut stream = open_stream(&app, "/webchat/events?chat=ann").await;
    let text = read_until(&mut stream, "text of r250.").await;
    let ids: Vec<u64> = text
        .lines()
        .filter_map(|line| line.strip_prefix("id: "))
        .map(|id| id.parse().unwrap())
        .collect();
    assert_eq!(ids, (1..=250).collect::<Vec<u64>>());
}

#[tokio::test]
async fn k5_only_pages_of_the_nodes_may_use_the_stream() {
    let (app, _stop) = chat_app(store().1);
    let from = async |origin: &str| {
        let mut request = plain("GET", "/webchat/nodes");
        request.headers_mut().insert("origin", origin.parse().unwrap());
        let (status, headers, _) = ask(&app, request).await;
        assert_eq!(status, 200);
        headers.get("access-control-allow-origin").map(|value| value.to_str().unwrap().to_owned())
    };
    for page in ["http://127.0.0.1:8101", "http://localhost:8102"] {
        assert_eq!(from(page).await.as_deref(), Some(page));
    }
    for page in ["http://evil.example", "http://127.0.0.1:9999", "null"] {
        assert_eq!(from(page).await, None, "{page}");
    }
}

#[tokio::test]
async fn m1_the_page_is_served_and_a_bad_chat_refused() {
    let (app, _stop) = chat_app(store().1);
    for path in ["/", "/chat", "/chat?chat=ann"] {
        let (status, headers, page) = ask(&app, plain("GET", path)).await;
        assert_eq!(status, 200);
        assert!(page.starts_with("<!doctype html>"));
        let policy = headers["content-security-policy"].to_str().unwrap();
        assert!(policy.contains("default-src 'none'") && policy.contains("http://127.0.0.1:8102"));
        // Self-contained: nothing is loaded from anywhere.
        assert!(!page.contains("src=\"http") && !page.contains("<link rel=\"stylesheet"));
    }
    let (status, _, body) = ask(&app, plain("GET", "/webchat/nodes")).await;
    assert_eq!(status, 200);
    assert!(body.contains("\"http://127.0.0.1:8102\""), "{body}");
    let long = format!("/webchat/events?chat={}", "c".repeat(600));
    for path in
        ["/webchat/events", "/webchat/events?chat=", "/webchat/events?chat=a&after=x", &*long]
    {
        assert_eq!(ask(&app, plain("GET", path)).await.0, 400, "{path}");
    }
}
