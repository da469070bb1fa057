//! A mail server to send to that fails on demand, and what tests read off a mail.
//!
//! It speaks the protocol over real sockets, and Python's `smtplib`, a client that knows nothing of
//! this project, works against it unchanged
//! (`d4_an_independent_client_sends_to_the_fake_smtp_server`).

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use botmesh::provider::email::Server;
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// A mail of few lines.
pub fn mail(from: &str, id: &str, subject: &str, text: &str) -> String {
    format!(
        "From: {from}\r\nTo: bot@shop.example\r\nMessage-ID: <{id}>\r\nSubject: {subject}\r\n\
         Date: Mon, 30 Nov 2026 10:00:00 +0000\r\n\r\n{text}\r\n"
    )
}

/// A field of a mail's header, unfolded; the first of that name.
pub fn field(raw: &str, name: &str) -> Option<String> {
    let head = raw.replace("\r\n", "\n");
    let head = head.split("\n\n").next()?.replace("\n ", " ").replace("\n\t", " ");
    head.lines().find_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
    })
}

/// The text of a mail of one part.
pub fn text(raw: &str) -> String {
    let raw = raw.replace("\r\n", "\n");
    raw.split_once("\n\n").map_or("", |(_, text)| text).trim().to_owned()
}

/// What a [`Smtp`] does to the next mail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Answers the recipient with this.
    Rcpt(&'static str),
    /// Answers the text with this.
    Text(&'static str),
    /// Takes the mail and closes without a word.
    TakesAndCloses,
    /// Closes when the text is to come.
    ClosesBefore,
}

type Told = Box<dyn Fn(&Taken) + Send + Sync>;

/// A mail that was taken.
#[derive(Clone, Debug)]
pub struct Taken {
    pub to: String,
    pub raw: String,
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct Smtp {
    pub address: SocketAddr,
    inner: Arc<SmtpInner>,
}

struct SmtpInner {
    taken: Mutex<Vec<Taken>>,
    faults: Mutex<VecDeque<Fault>>,
    /// Told of each mail that is taken, before its sender is.
    told: Mutex<Option<Told>>,
    /// Connections that are open.
    busy: AtomicU32,
}

impl Smtp {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let inner = SmtpInner {
            taken: Mutex::default(),
            faults: Mutex::default(),
            told: Mutex::default(),
            busy: AtomicU32::new(0),
        };
        let inner = Arc::new(inner);
        let shared = inner.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let inner = shared.clone();
                inner.busy.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    inner.serve(stream).await;
                    inner.busy.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, inner }
    }

    pub fn server(&self) -> Server {
        Server::plain("127.0.0.1", self.address.port()).login("shop", "secret")
    }

    pub fn fail_next(&self, fault: Fault) {
        self.inner.faults.lock().push_back(fault);
    }

    /// Calls this for each mail that is taken.
    pub fn tell(&self, told: impl Fn(&Taken) + Send + Sync + 'static) {
        *self.inner.told.lock() = Some(Box::new(told));
    }

    /// Whether somebody is sending.
    pub fn is_busy(&self) -> bool {
        self.inner.busy.load(Ordering::SeqCst) > 0
    }

    pub fn taken(&self) -> Vec<Taken> {
        self.inner.taken.lock().clone()
    }

    /// The texts that were sent to this address.
    pub fn texts(&self, to: &str) -> Vec<String> {
        let taken = self.taken();
        taken.iter().filter(|mail| mail.to == to).map(|mail| text(&mail.raw)).collect()
    }
}

impl SmtpInner {
    fn fault(&self, wanted: impl Fn(&Fault) -> bool) -> Option<Fault> {
        let mut faults = self.faults.lock();
        faults.front().is_some_and(wanted).then(|| faults.pop_front())?
    }

    /// One connection; it ends where the other side does.
    async fn serve(&self, stream: TcpStream) -> Option<()> {
        let (read, mut write) = stream.into_split();
        let mut read = BufReader::new(read);
        write.write_all(b"220 mx.example ready\r\n").await.ok()?;
        let mut to = None;
        let mut from = false;
        loop {
            let mut line = String::new();
            if read.read_line(&mut line).await.ok()? == 0 {
                return None;
            }
            let line = line.trim_end();
            let upper = line.to_ascii_uppercase();
            let said = |prefix: &str| upper.starts_with(prefix);
            let answer = if said("EHLO ") {
                "250-mx.example\r\n250-8BITMIME\r\n250-SMTPUTF8\r\n250 AUTH PLAIN"
            } else if said("HELO ") || said("NOOP") {
                "250 mx.example"
            } else if said("AUTH PLAIN ") {
                // "\0shop\0secret"
                match &line[11..] {
                    "AHNob3AAc2VjcmV0" => "235 2.7.0 welcome",
                    _ => "535 5.7.8 no",
                }
            } else if said("MAIL FROM:<") {
                from = true;
                "250 2.1.0 ok"
            } else if said("RCPT TO:<") && from {
                match self.fault(|fault| matches!(fault, Fault::Rcpt(_))) {
                    Some(Fault::Rcpt(answer)) => answer,
                    _ => {
                        let (_, rest) = line.split_once('<')?;
                        to = Some(rest.split('>').next()?.to_owned());
                        "250 2.1.5 ok"
                    }
                }
            } else if upper == "DATA" && to.is_some() {
                if self.fault(|fault| *fault == Fault::ClosesBefore).is_some() {
                    return None;
                }
                write.write_all(b"354 go ahead\r\n").await.ok()?;
                let raw = text_of(&mut read).await?;
                let fault = self.fault(|fault| !matches!(fault, Fault::Rcpt(_)));
                match fault {
                    Some(Fault::Text(answer)) => {
                        to = None;
                        from = false;
                        answer
                    }
                    fault => {
                        self.take(Taken { to: to.take()?, raw });
                        from = false;
                        if fault.is_some() {
                            return None;
                        }
                        "250 2.0.0 taken"
                    }
                }
            } else if said("RSET") {
                (to, from) = (None, false);
                "250 ok"
            } else if said("QUIT") {
                write.write_all(b"221 bye\r\n").await.ok()?;
                return None;
            } else {
                "503 5.5.1 not now"
            };
            write.write_all(format!("{answer}\r\n").as_bytes()).await.ok()?;
        }
    }

    fn take(&self, mail: Taken) {
        if let Some(told) = &*self.told.lock() {
            told(&mail);
        }
        self.taken.lock().push(mail);
    }
}

/// The text up to the line of a single dot, without the dots that were doubled.
async fn text_of(read: &mut (impl tokio::io::AsyncBufRead + Unpin)) -> Option<String> {
    let mut raw = String::new();
    loop {
        let mut line = String::new();
        if read.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        if line.trim_end() == "." {
            return Some(raw);
        }
        raw.push_str(line.strip_prefix('.').unwrap_or(&line));
    }
}
