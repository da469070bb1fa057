//! Real mail servers, as children of the test: Dovecot to read from and aiosmtpd to send to; and a way
//! to them that falls silent.

use std::net::TcpStream as StdTcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use botmesh::provider::email::Server;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Longer than a real server takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until something holds.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn installed(program: &str) -> bool {
    let dirs = ["/usr/sbin", "/usr/bin", "/usr/local/bin", "/usr/local/sbin"];
    dirs.iter().any(|dir| Path::new(dir).join(program).exists())
}

/// Whether a test can run that needs these; says so where it cannot.
pub fn have(programs: &[&str]) -> bool {
    let missing: Vec<&&str> = programs.iter().filter(|program| !installed(program)).collect();
    if !missing.is_empty() {
        let test = std::thread::current().name().unwrap_or("a test").to_owned();
        eprintln!("SKIPPED {test}: not installed: {missing:?} (.ci/run installs them)");
    }
    missing.is_empty()
}

/// A port that was free a moment ago, below those of outgoing connections.
fn port() -> u16 {
    loop {
        let port = rand::random_range(14_000..32_000);
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A Dovecot of one user, whose password is `secret`; killed with the test.
pub struct Dovecot {
    dir: TempDir,
    child: Option<Child>,
    idle: bool,
    pub port: u16,
    pub tls_port: u16,
    delivered: AtomicU32,
}

impl Drop for Dovecot {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Dovecot {
    /// Starts one with an empty mailbox; with TLS where a certificate for `localhost` is to be made.
    pub async fn start(tls: bool) -> Self {
        Self::able(tls, true).await
    }

    /// One that does not tell of new mail by itself.
    pub async fn start_without_idle() -> Self {
        Self::able(false, false).await
    }

    async fn able(tls: bool, idle: bool) -> Self {
        let dir = tempfile::Builder::new().prefix("mail").tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut server =
            Self { dir, child: None, idle, port: 0, tls_port: 0, delivered: AtomicU32::new(0) };
        for part in ["mail", "mail/new", "mail/cur", "mail/tmp", "home"] {
            std::fs::create_dir(server.path(part)).unwrap();
            server.give(&server.path(part));
        }
        if tls {
            server.certificate();
        }
        server.restart().await;
        server
    }

    fn path(&self, part: &str) -> PathBuf {
        self.dir.path().join(part)
    }

    /// Root may not read mail, so it is another's.
    fn give(&self, path: &Path) {
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(path, Some(65_534), Some(65_534)).unwrap();
        }
    }

    fn certificate(&self) {
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"])
            .args(["-nodes", "-days", "30", "-subj", "/CN=localhost"])
            .args(["-addext", "subjectAltName=DNS:localhost"])
            .args(["-addext", "basicConstraints=critical,CA:FALSE"])
            .arg("-keyout")
            .arg(self.path("key.pem"))
            .arg("-out")
            .arg(self.path("cert.pem"))
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let made = Command::new("openssl")
            .args(["x509", "-outform", "DER", "-in"])
            .arg(self.path("cert.pem"))
            .arg("-out")
            .arg(self.path("cert.der"))
            .status();
        assert!(made.unwrap().success());
    }

    pub fn root_certificate(&self) -> Vec<u8> {
        std::fs::read(self.path("cert.der")).unwrap()
    }

    fn configuration(&self) -> String {
        let dir = self.dir.path().display();
        let root = rustix::process::geteuid().is_root();
        let (uid, gid) = match root {
            true => (65_534, 65_534),
            false => (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw()),
        };
        let named = |flag: &str| {
            let said = Command::new("id").arg(flag).output().unwrap();
            String::from_utf8(said.stdout).unwrap().trim().to_owned()
        };
        let (user, group) = match root {
            true => ("nobody".to_owned(), "nogroup".to_owned()),
            false => (named("-un"), named("-gn")),
        };
        let ssl = match self.path("cert.pem").exists() {
            true => format!("ssl = yes\nssl_cert = <{dir}/cert.pem\nssl_key = <{dir}/key.pem"),
            false => "ssl = no".to_owned(),
        };
        let can = if self.idle { "" } else { "imap_capability = IMAP4rev1\n" };
        let (port, tls_port) = (self.port, self.tls_port);
        format!(
            "base_dir = {dir}/run\nstate_dir = {dir}/state\nlog_path = {dir}/log\n\
             protocols = imap\nlisten = 127.0.0.1\n{ssl}\n{can}disable_plaintext_auth = no\n\
             login_greeting = ready-{port}\nmail_location = maildir:{dir}/mail\n\
             mailbox_idle_check_interval = 1 secs\nfirst_valid_uid = 1\nfirst_valid_gid = 1\n\
             default_internal_user = {user}\ndefault_internal_group = {group}\n\
             default_login_user = {user}\npassdb {{\n driver = static\n args = password=secret\n}}\n\
             userdb {{\n driver = static\n args = uid={uid} gid={gid} home={dir}/home\n}}\n\
             service anvil {{\n chroot =\n}}\nservice imap-login {{\n chroot =\n\
             inet_listener imap {{\n port = {port}\n}}\ninet_listener imaps {{\n\
             port = {tls_port}\n ssl = yes\n}}\n}}\n"
        )
    }

    /// Starts it, again where it was stopped.
    pub async fn restart(&mut self) {
        let end = Instant::now() + PATIENCE;
        // Somebody may take the port first.
        loop {
            assert!(Instant::now() < end, "Dovecot does not start: {}", self.log());
            self.stop();
            self.port = port();
            self.tls_port = if self.path("cert.pem").exists() { port() } else { 0 };
            std::fs::write(self.path("conf"), self.configuration()).unwrap();
            let program = if Path::new("/usr/sbin/dovecot").exists() {
                "/usr/sbin/dovecot"
            } else {
                "dovecot"
            };
            let child = Command::new(program)
                .arg("-F")
                .arg("-c")
                .arg(self.path("conf"))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            self.child = Some(child);
            if self.greets().await {
                return;
            }
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Whether it is this one that answers at its port.
    async fn greets(&mut self) -> bool {
        let end = Instant::now() + Duration::from_secs(15);
        while Instant::now() < end {
            if self.child.as_mut().is_none_or(|child| child.try_wait().unwrap().is_some()) {
                return false;
            }
            let greeted = tokio::time::timeout(Duration::from_secs(5), async {
                let stream = TcpStream::connect(("127.0.0.1", self.port)).await.ok()?;
                let mut line = String::new();
                BufReader::new(stream).read_line(&mut line).await.ok()?;
                Some(line)
            });
            match greeted.await {
                Ok(Some(line)) if line.contains(&format!("ready-{}", self.port)) => return true,
                Ok(Some(line)) if !line.is_empty() => return false,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        false
    }

    /// Ends it, and all sessions.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It ends its own children when it is asked to end.
            if let Ok(None) = child.try_wait() {
                let pid = rustix::process::Pid::from_child(&child);
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
            let end = Instant::now() + Duration::from_secs(10);
            while matches!(child.try_wait(), Ok(None)) {
                if Instant::now() > end {
                    let _ = child.kill();
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    /// Where it is.
    pub fn server(&self) -> Server {
        Server::plain("127.0.0.1", self.port).login("shop", "secret")
    }

    /// A mail arrives.
    pub fn deliver(&self, raw: impl AsRef<[u8]>) {
        let n = self.delivered.fetch_add(1, Ordering::Relaxed);
        // Mails get their UIDs in the order of these names.
        let name = format!("{}.{n:06}.test", 1_800_000_000 + n);
        let unfinished = self.path("mail/tmp").join(&name);
        std::fs::write(&unfinished, raw).unwrap();
        self.give(&unfinished);
        std::fs::rename(unfinished, self.path("mail/new").join(name)).unwrap();
    }

    /// As after a restore or a move to another server: the same mails have other UIDs. It has to be
    /// stopped.
    pub fn rebuild(&self, validity: u32) {
        assert!(self.child.is_none(), "it would write its files again");
        for entry in std::fs::read_dir(self.path("mail")).unwrap().map(Result::unwrap) {
            if entry.file_name().to_string_lossy().starts_with("dovecot") {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        let list = self.path("mail/dovecot-uidlist");
        std::fs::write(&list, format!("3 V{validity} N1\n")).unwrap();
        self.give(&list);
    }
}

/// aiosmtpd, which puts what it gets into a Maildir; killed with the test.
pub struct Aiosmtpd {
    dir: TempDir,
    child: Child,
    port: u16,
}

impl Drop for Aiosmtpd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Aiosmtpd {
    pub async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let maildir = dir.path().join("mail");
        let end = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < end, "aiosmtpd does not start");
            let port = port();
            let mut child = Command::new("/usr/bin/python3")
                .args(["-m", "aiosmtpd", "-n", "-l", &format!("127.0.0.1:{port}")])
                .args(["-c", "aiosmtpd.handlers.Mailbox"])
                .arg(&maildir)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            while child.try_wait().unwrap().is_none() && Instant::now() < end {
                if StdTcpStream::connect(("127.0.0.1", port)).is_ok() {
                    return Self { dir, child, port };
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn server(&self) -> Server {
        Server::plain("127.0.0.1", self.port)
    }

    /// What it got.
    pub fn mails(&self) -> Vec<String> {
        let dir = std::fs::read_dir(self.dir.path().join("mail/new"));
        let files = dir.into_iter().flatten().map(|entry| entry.unwrap().path());
        let mut files: Vec<PathBuf> = files.collect();
        files.sort();
        files.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
    }
}

/// A way to a server that can fall silent. Cheap to clone.
#[derive(Clone)]
pub struct Relay {
    pub port: u16,
    /// Connections that were opened so far.
    opened: Arc<AtomicU32>,
    /// What those up to that number say, either way, stays on the way.
    silent: Arc<watch::Sender<u32>>,
}

impl Relay {
    pub async fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let relay = Self { port, opened: Arc::default(), silent: Arc::new(watch::channel(0).0) };
        let shared = relay.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(("127.0.0.1", to)).await else { continue };
                let number = shared.opened.fetch_add(1, Ordering::SeqCst) + 1;
                let (client_read, client_write) = client.into_split();
                let (server_read, server_write) = server.into_split();
                let silent = || shared.silent.subscribe();
                tokio::spawn(pass(client_read, server_write, number, silent()));
                tokio::spawn(pass(server_read, client_write, number, silent()));
            }
        });
        relay
    }

    pub fn opened(&self) -> u32 {
        self.opened.load(Ordering::SeqCst)
    }

    /// The connections that are open fall silent, without closing; new ones do not.
    pub fn silence(&self) {
        self.silent.send_replace(self.opened());
    }

    /// All connections fall silent, new ones as well.
    pub fn silence_all(&self) {
        self.silent.send_replace(u32::MAX);
    }

    /// Everything goes on.
    pub fn go_on(&self) {
        self.silent.send_replace(0);
    }
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    number: u32,
    mut silent: watch::Receiver<u32>,
) {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let read = from.read(&mut buffer).await;
        // Also the end is something that is said.
        if silent.wait_for(|up_to| number > *up_to).await.is_err() {
            return;
        }
        let Ok(size @ 1..) = read else { return };
        if to.write_all(&buffer[..size]).await.is_err() {
            return;
        }
    }
}
