use std::time::Instant;

use super::log::{self, LogFile};
use super::*;

struct Bench {
    _dir: tempfile::TempDir,
    spec: Spec,
    orders: watch::Sender<Order>,
    events: mpsc::Receiver<Event>,
    running: tokio::task::JoinHandle<()>,
}

impl Bench {
    fn start(script: &str, restart: bool) -> Self {
        Self::with(script, restart, None)
    }

    fn log(&self) -> String {
        log_of(&self.spec)
    }

    fn with(script: &str, restart: bool, hang_kill: Option<Duration>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let spec = Spec {
            name: "n1".to_owned(),
            program: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), script.to_owned()],
            output: Output::Log(dir.path().join("n1/log")),
            pid_file: Some(dir.path().join("n1/pid")),
        };
        let (orders, receiver) = watch::channel(Order::Run);
        let (sender, events) = mpsc::channel(64);
        let grace = Duration::from_secs(30);
        let (children, report) = (vec![spec.clone()], false);
        let options = Options { children, restart, grace, report, hang_kill };
        let running = tokio::spawn(run(options, receiver, sender));
        Self { _dir: dir, spec, orders, events, running }
    }

    async fn next(&mut self) -> Event {
        let next = tokio::time::timeout(Duration::from_secs(20), self.events.recv());
        next.await.expect("an event in time").expect("an event")
    }

    async fn started(&mut self) -> u32 {
        loop {
            if let Event::Started { pid, .. } = self.next().await {
                return pid;
            }
        }
    }

    async fn ended(&mut self) -> (ExitStatus, Option<Duration>) {
        loop {
            if let Event::Ended { status, again_in, .. } = self.next().await {
                return (status, again_in);
            }
        }
    }
}

fn alive(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[tokio::test]
async fn n1_a_child_that_ends_is_started_again_with_growing_pauses() {
    let mut bench = Bench::start("exit 3", true);
    let mut pauses = Vec::new();
    let mut pids = std::collections::BTreeSet::new();
    for _ in 0..3 {
        pids.insert(bench.started().await);
        let (status, again) = bench.ended().await;
        assert_eq!(status.code(), Some(3));
        pauses.push(again.expect("it is started again"));
    }
    assert_eq!(pids.len(), 3);
    assert_eq!(pauses, [PAUSE_MIN, PAUSE_MIN * 2, PAUSE_MIN * 4]);
    bench.orders.send(Order::Stop).unwrap();
    bench.running.await.unwrap();
}

#[tokio::test]
async fn n1_no_restart_leaves_it_down() {
    let mut bench = Bench::start("kill -9 $$", false);
    bench.started().await;
    let (status, again) = bench.ended().await;
    assert_eq!(status.code(), None, "a signal ended it");
    assert_eq!(again, None);
    bench.running.await.unwrap();
}

#[tokio::test]
async fn n1_stop_is_sigterm_and_the_second_order_kills() {
    // A child that ends well on SIGTERM.
    let mut bench = Bench::start("trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done", true);
    bench.started().await;
    wait_for_log(&bench.spec, "up").await;
    bench.orders.send(Order::Stop).unwrap();
    let (status, again) = bench.ended().await;
    assert_eq!((status.code(), again), (Some(0), None));
    bench.running.await.unwrap();

    // One that does not: the second order does not wait for the grace.
    let mut bench = Bench::start("trap '' TERM; echo up; while :; do sleep 0.05; done", true);
    let pid = bench.started().await;
    wait_for_log(&bench.spec, "up").await;
    bench.orders.send(Order::Stop).unwrap();
    assert!(alive(pid));
    bench.orders.send(Order::Kill).unwrap();
    bench.running.await.unwrap();
    assert!(!alive(pid), "after run() no child is left");
}

#[tokio::test]
async fn n1_output_goes_to_the_log_and_warnings_to_the_console() {
    let script = "echo plain; \
                  echo '2026-01-01T00:00:00Z  WARN botmesh: careful' >&2; echo 'error: no' >&2";
    let mut bench = Bench::start(script, false);
    let mut warned = Vec::new();
    loop {
        match bench.next().await {
            Event::Warned { line, .. } => warned.push(line),
            Event::Ended { .. } => break,
            _ => {}
        }
    }
    assert_eq!(warned.len(), 2, "{warned:?}");
    assert!(warned[0].ends_with("careful") && warned[1] == "error: no");
    let log = bench.log();
    assert!(log.contains("plain\n") && log.contains("careful\n"), "{log}");
}

#[tokio::test]
async fn n1_the_pid_file_goes_with_the_process() {
    let mut bench = Bench::start("trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done", true);
    bench.started().await;
    wait_for_log(&bench.spec, "up").await;
    let pid_file = bench.spec.pid_file.clone().unwrap();
    std::fs::write(&pid_file, "1").unwrap();
    bench.orders.send(Order::Stop).unwrap();
    bench.running.await.unwrap();
    assert!(!pid_file.exists());
}

#[test]
fn the_log_file_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let mut log = LogFile::open(&path).unwrap();
    let line = vec![b'x'; 1024 * 1024];
    for _ in 0..20 {
        log.write(&line);
    }
    let size = |path: &std::path::Path| std::fs::metadata(path).unwrap().len();
    assert!(size(&path) <= log::BYTES_MAX);
    assert_eq!(size(&dir.path().join("log.1")), log::BYTES_MAX);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}

async fn wait_for_log(spec: &Spec, word: &str) {
    let found = async {
        while !log_of(spec).contains(word) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), found).await.expect("the child runs");
}

fn log_of(spec: &Spec) -> String {
    let Output::Log(path) = &spec.output else { panic!("it goes to a file") };
    std::fs::read_to_string(path).unwrap_or_default()
}

#[tokio::test]
async fn e6_a_stopped_child_is_killed_where_asked_for() {
    let hang_kill = Some(Duration::from_millis(300));
    let mut bench = Bench::with("echo up; kill -STOP $$; echo no", false, hang_kill);
    bench.started().await;
    loop {
        match bench.next().await {
            Event::Hangs { why, .. } => assert_eq!(why, "it is stopped"),
            Event::Ended { status, .. } => {
                assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
                break;
            }
            _ => {}
        }
    }
    bench.running.await.unwrap();

    // Going on in time is life.
    let script = "(sleep 0.1; kill -CONT $$) & kill -STOP $$; wait; sleep 0.5; exit 4";
    let mut bench = Bench::with(script, false, Some(Duration::from_millis(400)));
    bench.started().await;
    assert_eq!(bench.ended().await.0.code(), Some(4));
    bench.running.await.unwrap();
}

/// Whoever asks is told what the kernel says of it: this test's own process is not the child.
#[tokio::test]
async fn e6_only_the_process_that_is_waited_for_gets_the_token() {
    use std::io::{BufRead, BufReader};
    let mut bench = Bench::start("echo $BOTMESH__SUPERVISOR; while :; do sleep 0.05; done", true);
    let child = bench.started().await;
    wait_for_log(&bench.spec, "botmesh-").await;
    let name = bench.log().trim().to_owned();
    let answer = tokio::task::spawn_blocking(move || {
        let address = link::address(&name).unwrap();
        let stream = std::os::unix::net::UnixStream::connect_addr(&address).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    });
    let answer = answer.await.unwrap();
    assert!(answer.contains("refused") && answer.contains(&child.to_string()), "{answer}");
    let (found, waited) = loop {
        if let Event::Stranger { pid, child, .. } = bench.next().await {
            break (pid, child);
        }
    };
    assert_eq!((found, waited), (std::process::id(), child));
    bench.orders.send(Order::Kill).unwrap();
    bench.running.await.unwrap();
}

/// The child of the next test: gives signs of life for a while, then blocks its only thread.
#[test]
#[ignore = "runs as the child of the other tests here"]
fn gives_signs_of_life_and_hangs() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let link = attach().unwrap().expect("the parent waits for this process");
        link.start();
        println!("up {}", link.token());
        tokio::time::sleep(Duration::from_millis(600)).await;
        println!("blocks");
        loop {
            std::thread::park();
        }
    });
}

#[tokio::test]
async fn e6_a_silent_child_is_killed_where_asked_for() {
    let program = std::env::current_exe().unwrap();
    let name = "supervise::tests::gives_signs_of_life_and_hangs";
    let script = format!("exec {} --exact {name} --ignored --nocapture", program.display());
    let mut bench = Bench::with(&script, false, Some(Duration::from_millis(500)));
    let began = Instant::now();
    bench.started().await;
    loop {
        match bench.next().await {
            Event::Hangs { why, .. } => assert_eq!(why, "it is silent"),
            Event::Ended { status, .. } => {
                assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
                break;
            }
            _ => {}
        }
    }
    assert!(began.elapsed() > Duration::from_millis(1_000), "not while it gave signs of life");
    assert!(bench.log().contains("blocks"), "{}", bench.log());
    bench.running.await.unwrap();
}
