//! One child, life after life: start, wait, report, pause, start again.

use std::convert::Infallible;
use std::future::pending;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use futures_util::future::{join, maybe_done};
use parking_lot::Mutex;
use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::attach::PARENT_VARIABLE;
use super::children::{Children, Life, Running};
use super::link::{Acquaintance, Contacts, Desk, SOCKET_VARIABLE};
use super::log::LogFile;
use super::report::Reporter;
use super::{Event, Options, Order, Output, PAUSE_MAX, PAUSE_MIN, Spec, WELL_AFTER};
use crate::types::ProcessToken;

/// A sign of life may already be in the socket when its time is over: the parent itself may have
/// been paused. So long it is looked for before the child is killed.
const SECOND_LOOK: Duration = Duration::from_millis(50);
/// Signs of life in the time after which silence is taken for a hang.
const BEATS: u32 = 4;
/// How long output is still read once the child is dead: others may hold its pipe.
const LAST_WORDS: Duration = Duration::from_secs(1);

pub(super) struct Keeper<'a> {
    pub(super) spec: &'a Spec,
    pub(super) options: &'a Options,
    pub(super) children: &'a Children,
    pub(super) orders: watch::Receiver<Order>,
    pub(super) events: mpsc::Sender<Event>,
    pub(super) reporter: Option<Reporter>,
}

/// What one life leaves to the next.
#[derive(Default)]
struct Past {
    /// Reports under way, each bounded by itself.
    reports: JoinSet<()>,
    /// Whom the child told of last.
    contacts: Option<Contacts>,
}

impl Keeper<'_> {
    pub(super) async fn keep(self) {
        let mut orders = self.orders.clone();
        let mut past = Past::default();
        let mut pause = PAUSE_MIN;
        while *self.orders.borrow() == Order::Run {
            let started = Instant::now();
            let ended = self.once(&mut past).await;
            if started.elapsed() >= WELL_AFTER {
                pause = PAUSE_MIN;
            }
            let goes_on = self.options.restart && *self.orders.borrow() == Order::Run;
            let name = self.spec.name.clone();
            self.tell(match ended {
                Ok(status) => Event::Ended { name, status, again_in: goes_on.then_some(pause) },
                Err(why) => Event::Failed { name, why },
            });
            if !goes_on {
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = ordered(&mut orders, Order::Interrupt) => break,
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
        while past.reports.join_next().await.is_some() {}
    }

    /// One life of the child.
    async fn once(&self, past: &mut Past) -> Result<ExitStatus, String> {
        let desk = Desk::open(self.options.hang_kill.map(|after| after / BEATS))
            .map_err(|error| format!("cannot open a socket for it: {error}"))?;
        let mut child = self.spawn(&desk)?;
        let pid = child.pid();
        self.tell(Event::Started { name: self.spec.name.clone(), pid });
        let log = self.log()?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let copies = maybe_done(join(
            self.copy(out.map(OwnedFd::from), log.as_ref()),
            self.copy(err.map(OwnedFd::from), log.as_ref()),
        ));
        tokio::pin!(copies);
        let known = Mutex::new(Acquaintance::default());
        let stranger = |found| {
            let name = self.spec.name.clone();
            self.tell(Event::Stranger { name, pid: found, child: pid });
        };
        let status = tokio::select! {
            status = self.wait(&child, &known) => status,
            // Output may end long before the child, and long after it.
            never = async { copies.as_mut().await; pending::<Infallible>().await } => match never {},
            never = desk.serve(pid, &known, stranger) => match never {},
        };
        // It is certainly dead from here on, and not a moment earlier.
        self.report(desk.token(), known.into_inner(), past);
        // Its last words are the ones that say why, but for them nobody waits longer.
        let _ = tokio::time::timeout(LAST_WORDS, copies).await;
        if let Some(file) = &self.spec.pid_file {
            // Nobody else may be taken for this process once its number is used again.
            let _ = std::fs::remove_file(file);
        }
        Ok(status)
    }

    fn spawn(&self, desk: &Desk) -> Result<Running<'_>, String> {
        let output = || match self.spec.output {
            Output::Log(_) => Stdio::piped(),
            Output::Inherited => Stdio::inherit(),
        };
        let mut command = Command::new(&self.spec.program);
        command
            .args(&self.spec.arguments)
            .env(PARENT_VARIABLE, std::process::id().to_string())
            .env(SOCKET_VARIABLE, desk.name())
            .stdin(Stdio::null())
            .stdout(output())
            .stderr(output())
            // A group of its own: Ctrl-C of the terminal reaches the parent only, which stops its
            // children in order.
            .process_group(0);
        self.children
            .spawn(&mut command)
            .map_err(|error| format!("cannot start {}: {error}", self.spec.program.display()))
    }

    fn log(&self) -> Result<Option<Mutex<LogFile>>, String> {
        let Output::Log(path) = &self.spec.output else { return Ok(None) };
        let log = LogFile::open(path)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(Some(Mutex::new(log)))
    }

    /// Waits for the child's end, and brings it about where ordered, or where it hangs.
    async fn wait(&self, child: &Running<'_>, known: &Mutex<Acquaintance>) -> ExitStatus {
        let mut orders = self.orders.clone();
        tokio::select! {
            status = child.ended() => return status,
            () = ordered(&mut orders, Order::Interrupt) => {}
            why = self.hangs(child.life(), known) => {
                self.tell(Event::Hangs { name: self.spec.name.clone(), why });
                child.signal(Signal::KILL);
                return child.ended().await;
            }
        }
        let order = *orders.borrow();
        if order < Order::Kill {
            let stop = if order == Order::Interrupt { Signal::INT } else { Signal::TERM };
            child.signal(stop);
            tokio::select! {
                status = child.ended() => return status,
                () = ordered(&mut orders, Order::Kill) => {}
                () = tokio::time::sleep(self.options.grace) => {}
            }
        }
        child.signal(Signal::KILL);
        child.ended().await
    }

    /// Returns, in words, once the child has been stopped or silent for too long. One that never
    /// gave a sign of life is not expected to.
    async fn hangs(
        &self,
        mut life: watch::Receiver<Life>,
        known: &Mutex<Acquaintance>,
    ) -> &'static str {
        let Some(after) = self.options.hang_kill else { return pending().await };
        let mut stopped: Option<Instant> = None;
        let mut looked = false;
        loop {
            let beat = known.lock().beat;
            let over = stopped.into_iter().chain(beat).min().map(|since| since + after);
            if over.is_some_and(|over| Instant::now() >= over) {
                if looked {
                    return if stopped.is_some() { "it is stopped" } else { "it is silent" };
                }
                looked = true;
                tokio::time::sleep(SECOND_LOOK).await;
                continue;
            }
            looked = false;
            let wake = over.unwrap_or_else(|| Instant::now() + after);
            tokio::select! {
                () = tokio::time::sleep_until(wake) => {}
                // The sender stays until the child has ended.
                _ = life.changed() => {
                    let now = *life.borrow_and_update();
                    match now {
                        Life::Stopped => stopped = stopped.or_else(|| Some(Instant::now())),
                        Life::Running => stopped = None,
                        Life::Ended(_) => return pending().await,
                    }
                }
            }
        }
    }

    /// Tells the group, where the dead child could have had sessions in one.
    fn report(&self, token: ProcessToken, known: Acquaintance, past: &mut Past) {
        if known.contacts.is_some() {
            past.contacts = known.contacts;
        }
        let (Some(reporter), Some(contacts)) = (&self.reporter, &past.contacts) else { return };
        let alone = contacts.peers.iter().all(|peer| *peer == contacts.own);
        if !known.has_token || alone {
            return;
        }
        let (reporter, contacts) = (reporter.clone(), contacts.clone());
        let (orders, events) = (self.orders.clone(), self.events.clone());
        let name = self.spec.name.clone();
        past.reports.spawn(async move {
            let event = match reporter.report(token, &contacts, orders).await {
                Ok(took) => Event::Reported { name, took },
                Err(why) => Event::Unreported { name, why },
            };
            let _ = events.try_send(event);
        });
    }

    async fn copy(&self, from: Option<OwnedFd>, log: Option<&Mutex<LogFile>>) {
        let (Some(from), Some(log)) = (from, log) else { return };
        let Ok(from) = pipe::Receiver::from_owned_fd(from) else { return };
        let mut reader = BufReader::new(from);
        let mut line = Vec::new();
        loop {
            line.clear();
            // A read error of a pipe means that nothing more comes.
            match reader.read_until(b'\n', &mut line).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            log.lock().write(&line);
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end();
            if is_warning(text) {
                self.tell(Event::Warned { name: self.spec.name.clone(), line: text.to_owned() });
            }
        }
    }

    /// Events are for people to read; when nobody keeps up, the log file has it all.
    fn tell(&self, event: Event) {
        let _ = self.events.try_send(event);
    }
}

/// Returns once at least this much was ordered. A closed channel means that whoever gives orders is
/// gone, which is one too.
async fn ordered(orders: &mut watch::Receiver<Order>, at_least: Order) {
    let _ = orders.wait_for(|order| *order >= at_least).await;
}

/// Whether a line is worth the console: levels of `tracing`, a panic, or the closing error line.
/// openraft warns at every failed attempt to reach a peer; those stay in the log.
fn is_warning(line: &str) -> bool {
    let head: String = line.chars().take(48).collect();
    head.contains(" WARN ") && !head.contains(" WARN openraft")
        || head.contains(" ERROR ")
        || head.starts_with("error: ")
        || head.contains("panicked at")
}
