//! The chat page in a real browser (SPEC D4; issue *the spine*): a node dies under an open page.
//!
//! Chromium is driven over WebDriver. Where no `chromedriver` is installed the tests say so by name
//! and pass: what they prove cannot be had without a browser.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fantoccini::wd::Capabilities;
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::json;

use support::cluster::{Arena, Cluster, Options};
use support::demo::Demo;

/// How long anything on the page may take, on a machine that runs other tests beside.
const PATIENCE: Duration = Duration::from_secs(60);

/// `chromedriver`, killed with its browser when the test ends.
struct Driver {
    child: Child,
    port: u16,
    _profile: tempfile::TempDir,
}

impl Driver {
    /// Starts it; `None` where it is not installed.
    async fn start(test: &str) -> Option<Self> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let started = Command::new("chromedriver")
            .arg(format!("--port={port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = match started {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("SKIPPED {test}: chromedriver is not installed");
                return None;
            }
            Err(error) => panic!("chromedriver does not start: {error}"),
        };
        let profile = tempfile::Builder::new()
            .prefix("chromium-")
            .tempdir_in(env!("CARGO_TARGET_TMPDIR"))
            .unwrap();
        let driver = Self { child, port, _profile: profile };
        driver.wait_up().await;
        Some(driver)
    }

    async fn wait_up(&self) {
        let until = Instant::now() + PATIENCE;
        while tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            assert!(Instant::now() < until, "chromedriver does not listen");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn browser(&self) -> Client {
        let profile = format!("--user-data-dir={}", self._profile.path().display());
        let options = json!({ "args": [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", "--no-proxy-server", profile,
        ]});
        let mut capabilities = Capabilities::new();
        capabilities.insert("goog:chromeOptions".to_owned(), options);
        ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities)
            .connect(&format!("http://127.0.0.1:{}", self.port))
            .await
            .expect("a browser opens")
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // SIGTERM: chromedriver then ends its browsers, which SIGKILL would leave behind.
        let pid = rustix::process::Pid::from_raw(self.child.id().cast_signed());
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.child.wait();
    }
}

/// What the page shows: (kind, text) in order.
async fn shown(page: &Client) -> Vec<(String, String)> {
    let script = "return [...document.querySelectorAll('#log li')].map((item) => \
                  [item.className, item.querySelector('.body').textContent]);";
    let shown = page.execute(script, vec![]).await.expect("the page answers");
    serde_json::from_value(shown).expect("pairs of texts")
}

/// The numbers of the replies shown, in order.
async fn numbers(page: &Client) -> Vec<u64> {
    let script = "return [...document.querySelectorAll('#log .reply')].map((item) => \
                  Number(item.dataset.number));";
    serde_json::from_value(page.execute(script, vec![]).await.unwrap()).unwrap()
}

/// The node whose stream the page has open; empty while it has none.
async fn node_of(page: &Client) -> String {
    let script = "const state = document.querySelector('#state'); \
                  return state.dataset.state === 'open' ? state.dataset.node : '';";
    page.execute(script, vec![]).await.unwrap().as_str().unwrap().trim_end_matches('/').to_owned()
}

async fn say(page: &Client, text: &str) {
    let field = page.find(Locator::Css("#text")).await.unwrap();
    field.send_keys(text).await.unwrap();
    page.find(Locator::Css("#say button")).await.unwrap().click().await.unwrap();
}

/// Waits until the page shows so many replies, and returns the last.
async fn reply(page: &Client, count: usize) -> String {
    let until = Instant::now() + PATIENCE;
    loop {
        let all = shown(page).await;
        let replies: Vec<&String> =
            all.iter().filter(|(kind, _)| kind == "reply").map(|(_, text)| text).collect();
        assert!(replies.len() <= count, "more than {count} replies: {all:?}");
        if replies.len() == count {
            return replies[count - 1].clone();
        }
        assert!(Instant::now() < until, "no reply {count}: {all:?}, at {:?}", node_of(page).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn connected(page: &Client) -> String {
    let until = Instant::now() + PATIENCE;
    loop {
        let node = node_of(page).await;
        if !node.is_empty() {
            return node;
        }
        assert!(Instant::now() < until, "the page has no stream: {:?}", shown(page).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Three nodes that know each other's public addresses.
async fn group() -> Cluster {
    let options = Options::nodes(3).lease("2s");
    Cluster::start_prepared(&options, Arena::enter().await, |cluster| {
        let all: Vec<String> = cluster.nodes.iter().map(|node| node.public.to_string()).collect();
        for node in &mut cluster.nodes {
            node.env.push(("BOTMESH_PUBLIC_PEERS".to_owned(), all.join(",")));
        }
    })
    .await
}

fn texts(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(kind, text)| ((*kind).to_owned(), (*text).to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d4_the_page_goes_on_at_another_node_when_its_own_is_killed() {
    let test = "d4_the_page_goes_on_at_another_node_when_its_own_is_killed";
    let Some(driver) = Driver::start(test).await else { return };
    let mut cluster = group().await;
    let page = driver.browser().await;

    // Two questions at n1.
    let home = cluster.nodes[0].public_base();
    page.goto(&format!("{home}/chat?chat=ann")).await.unwrap();
    assert_eq!(connected(&page).await, home);
    say(&page, "order").await;
    assert_eq!(reply(&page, 1).await, "What would you like?");
    say(&page, "tea").await;
    assert_eq!(reply(&page, 2).await, "How many?");

    // Its node dies; the page finds another by itself and the order goes on where it was.
    cluster.nodes[0].kill();
    say(&page, "2").await;
    assert_eq!(reply(&page, 3).await, "Where to?");
    let second = connected(&page).await;
    assert!(cluster.nodes[1..].iter().any(|node| node.public_base() == second), "{second}");

    // What is said elsewhere in the same chat shows up here too.
    cluster.restart(0).await;
    let demo = Demo::new(cluster.public());
    demo.post(2, "from-outside", "ann", "Main St 5").await;
    assert_eq!(reply(&page, 4).await, "Confirm? (yes/no)");
    say(&page, "yes").await;
    let end = reply(&page, 5).await;
    for answer in ["tea", "2", "Main St 5"] {
        assert!(end.contains(answer), "{answer} is not in {end}");
    }

    // Nothing missed, nothing twice, in the order said.
    assert_eq!(numbers(&page).await, [1, 2, 3, 4, 5]);
    let expected = texts(&[
        ("own", "order"),
        ("reply", "What would you like?"),
        ("own", "tea"),
        ("reply", "How many?"),
        ("own", "2"),
        ("reply", "Where to?"),
        ("reply", "Confirm? (yes/no)"),
        ("own", "yes"),
        ("reply", &end),
    ]);
    assert_eq!(shown(&page).await, expected);

    // A reload shows the same: own messages from the tab, replies from the group.
    page.refresh().await.unwrap();
    reply(&page, 5).await;
    assert_eq!(shown(&page).await, expected);
    page.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d4_messages_written_while_no_node_answers_arrive_once_and_in_order() {
    let test = "d4_messages_written_while_no_node_answers_arrive_once_and_in_order";
    let Some(driver) = Driver::start(test).await else { return };
    let mut cluster = group().await;
    let page = driver.browser().await;
    page.goto(&format!("{}/chat?chat=bob", cluster.nodes[1].public_base())).await.unwrap();
    connected(&page).await;
    say(&page, "hello").await;
    assert_eq!(reply(&page, 1).await, "echo: hello");

    // All at once; what is written meanwhile waits in the page.
    for node in &mut cluster.nodes {
        node.kill();
    }
    for text in ["one", "two", "three"] {
        say(&page, text).await;
    }
    for index in 0..3 {
        cluster.nodes[index].start(&[]);
    }
    assert_eq!(reply(&page, 4).await, "echo: three");
    let replies: Vec<String> = shown(&page)
        .await
        .into_iter()
        .filter(|(kind, _)| kind == "reply")
        .map(|(_, text)| text)
        .collect();
    assert_eq!(replies, ["echo: hello", "echo: one", "echo: two", "echo: three"]);
    assert_eq!(numbers(&page).await, [1, 2, 3, 4]);
    let state = "return [...document.querySelectorAll('#log .own')].map((item) => \
                 item.dataset.state);";
    let states: Vec<String> =
        serde_json::from_value::<Vec<String>>(page.execute(state, vec![]).await.unwrap()).unwrap();
    assert!(states.iter().all(|state| state == "sent"), "{states:?}");
    page.close().await.unwrap();
}
