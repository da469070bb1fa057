//! Email against real servers: who reads, from where, what is answered and what is not.

use std::sync::Arc;
use std::time::Duration;

use botmesh::bot::{Bot, BotBuilder, Coordination, Event, Events, Route};
use botmesh::clock::Clock;
use botmesh::provider::DeliverError;
use botmesh::provider::email::{Email, Ingested, Server};
use botmesh::testing::{CoordinatorOptions, ManualClock, MemoryCoordinator, MemoryHub};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::mail::{Aiosmtpd, Dovecot, Relay, have, until};
use super::smtp::{Fault, Smtp, field, mail, text};
use super::support::PAST_LEASE;

const ANN: &str = "ann@a.example";

pub struct Replica {
    pub bot: Bot,
    coordinator: MemoryCoordinator,
}

/// Of address bot@shop.example, without a bound that these tests would meet.
pub fn email() -> Email {
    Email::new("mail", "Bot@shop.example").unwrap().turns_max(1_000, Duration::from_secs(1))
}

fn reading(server: Server) -> Email {
    email().imap(server, "INBOX").probe_every(Duration::from_secs(2))
}

pub async fn start(
    hub: &MemoryHub,
    email: Email,
    make: impl FnOnce(BotBuilder) -> BotBuilder,
) -> Replica {
    let prefix = MemoryHub::default_prefix();
    let coordinator = MemoryCoordinator::with(hub, prefix.clone(), CoordinatorOptions::default());
    let bot = make(Bot::builder()).provider(email).store(hub.store(prefix));
    let bot = bot.coordination(Coordination::new(coordinator.clone())).build().await.unwrap();
    bot.start().await.unwrap();
    Replica { bot, coordinator }
}

/// Hands a mail in, again while the bot takes nothing yet.
pub async fn hand_in(email: &Email, raw: &[u8]) -> Result<Ingested, DeliverError> {
    loop {
        match email.ingest(raw).await {
            Err(DeliverError::Unavailable { .. }) => tokio::task::yield_now().await,
            taken => return taken,
        }
    }
}

fn echo(bot: BotBuilder) -> BotBuilder {
    bot.on(Route::Any, async |ctx| {
        let said = format!("echo: {}", ctx.text());
        Ok(ctx.reply(said).await?)
    })
}

/// The errors that are told of items that were left out, as they come.
fn errors(mut events: Events) -> Arc<Mutex<Vec<String>>> {
    let found: Arc<Mutex<Vec<String>>> = Arc::default();
    let noted = found.clone();
    tokio::spawn(async move {
        while let Some(event) = events.next().await {
            if let Event::Error { error, .. } = event {
                noted.lock().push(error.to_string());
            }
        }
    });
    found
}

fn figure(bot: &Bot, name: &str) -> u64 {
    bot.figures().iter().filter(|figure| figure.name == name).map(|figure| figure.value).sum()
}

/// Lets the lease of whoever died run out.
async fn past_lease(clock: &ManualClock) {
    for _ in 0..PAST_LEASE.as_millis() / 500 {
        clock.advance(Duration::from_millis(500));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn d4_a_mail_is_answered_in_its_thread() {
    if !have(&["dovecot", "aiosmtpd"]) {
        return;
    }
    let (dovecot, smtp) = (Dovecot::start(false).await, Aiosmtpd::start().await);
    // What was there before is not answered.
    dovecot.deliver(mail(ANN, "before@a.example", "old", "old"));
    let hub = MemoryHub::new();
    let email = reading(dovecot.server()).smtp(smtp.server()).name("Der Bot für alle");
    let a = start(&hub, email, echo).await;
    a.bot.ready().await;
    dovecot.deliver(
        "Return-Path: <ann@a.example>\r\nFrom: =?utf-8?q?Ann_=C3=84?= <Ann@A.example>\r\n\
         To: bot@shop.example\r\nMessage-ID: <m1@a.example>\r\nReferences: <r1@a.example>\r\n \
         <r2@a.example>\r\nIn-Reply-To: <r2@a.example>\r\nSubject: Re: =?utf-8?b?VMOk4oKsdA==?=\r\n\
         MIME-Version: 1.0\r\nContent-Type: text/plain; charset=iso-8859-1\r\n\
         Content-Transfer-Encoding: quoted-printable\r\n\r\ngr=FC=DFe\r\n\r\n\
         On Mon, 30 Nov 2026, Bot wrote:\r\n> hello\r\n",
    );
    until("it is answered", || !smtp.mails().is_empty()).await;
    let answer = smtp.mails()[0].clone();
    let at = |name: &str| field(&answer, name).unwrap_or_else(|| panic!("{name}: {answer}"));
    assert_eq!(at("In-Reply-To"), "<m1@a.example>");
    assert_eq!(at("References"), "<r1@a.example> <r2@a.example> <m1@a.example>");
    assert!(at("To").contains("ann@a.example"));
    assert!(at("From").contains("Bot@shop.example"), "{answer}");
    assert!(at("Message-ID").starts_with("<botmesh-"));
    assert!(at("Message-ID").ends_with("@shop.example>"));
    assert!(at("Subject").starts_with("Re: =?utf-8?b?"), "{answer}");
    assert_eq!(at("Auto-Submitted"), "auto-replied");
    // "echo: grüße", in an encoding of the client's choice.
    let said = ["echo: gr=C3=BC=C3=9Fe", "ZWNobzogZ3LDvMOfZQ==", "echo: grüße"];
    assert!(said.contains(&text(&answer).as_str()), "{answer}");
    // Its own mail, sent back by a list or a rule under another's name, makes no turn.
    let own = at("Message-ID");
    dovecot.deliver(mail("list@l.example", own.trim_matches(['<', '>']), "Re: x", "echo"));
    dovecot.deliver(mail("BOT@shop.example", "own@a.example", "Re: x", "echo"));
    dovecot.deliver(mail(ANN, "m2@a.example", "more", "more"));
    until("the next is answered", || smtp.mails().len() >= 2).await;
    until("the two are passed by", || figure(&a.bot, "unknown_events") == 2).await;
    assert_eq!(smtp.mails().len(), 2, "neither old nor own mail is answered");
    a.bot.stop().await.unwrap();
}

#[tokio::test]
async fn d4_an_independent_client_sends_to_the_fake_smtp_server() {
    if !have(&["python3"]) {
        return;
    }
    let smtp = Smtp::start().await;
    smtp.fail_next(Fault::Rcpt("450 4.2.0 later"));
    smtp.fail_next(Fault::Text("554 5.7.1 no"));
    let script = format!(
        "import smtplib\n\
         s = smtplib.SMTP('127.0.0.1', {})\n\
         s.login('shop', 'secret')\n\
         text = 'Subject: x\\r\\n\\r\\n.dot\\r\\n..\\r\\nend\\r\\n'\n\
         try: s.sendmail('a@b.example', ['c@d.example'], text); raise SystemExit('taken')\n\
         except smtplib.SMTPRecipientsRefused as e: assert e.recipients['c@d.example'][0] == 450\n\
         try: s.sendmail('a@b.example', ['c@d.example'], text); raise SystemExit('taken')\n\
         except smtplib.SMTPDataError as e: assert e.smtp_code == 554\n\
         assert s.sendmail('a@b.example', ['c@d.example'], text) == {{}}\n\
         s.quit()\n\
         s = smtplib.SMTP('127.0.0.1', {})\n\
         try: s.login('shop', 'wrong'); raise SystemExit('let in')\n\
         except smtplib.SMTPAuthenticationError: pass\n",
        smtp.address.port(),
        smtp.address.port(),
    );
    let mut client = tokio::process::Command::new("/usr/bin/python3");
    let done = client.arg("-c").arg(script).output().await.unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(smtp.taken().len(), 1);
    assert_eq!(smtp.taken()[0].raw, "Subject: x\r\n\r\n.dot\r\n..\r\nend\r\n");
}

#[tokio::test]
async fn d5_another_replica_goes_on_where_the_first_one_stopped_reading() {
    if !have(&["dovecot"]) {
        return;
    }
    let (dovecot, smtp) = (Dovecot::start(false).await, Smtp::start().await);
    dovecot.deliver(mail(ANN, "0@a.example", "s", "already there"));
    let hub = MemoryHub::new();
    let provider = || reading(dovecot.server()).smtp(smtp.server()).from_the_beginning();
    let a = start(&hub, provider(), echo).await;
    let b = start(&hub, provider(), echo).await;
    until("what was there is answered", || smtp.texts(ANN) == ["echo: already there"]).await;
    let ready = tokio::time::timeout(Duration::from_millis(1), b.bot.ready()).await;
    assert!(ready.is_err(), "one reads, the other stands by");
    a.bot.stop().await.unwrap();
    for n in 1..=40 {
        dovecot.deliver(mail(ANN, &format!("{n}@a.example"), "s", &n.to_string()));
    }
    until("the other answers", || smtp.texts(ANN).len() >= 41).await;
    let wanted = (1..=40).map(|n| format!("echo: {n}"));
    let wanted: Vec<String> = std::iter::once("echo: already there".into()).chain(wanted).collect();
    assert_eq!(smtp.texts(ANN), wanted, "in order, once each");
    b.bot.stop().await.unwrap();
}

#[tokio::test]
async fn case_w19_a_server_that_falls_silent_keeps_no_mail_back() {
    if !have(&["dovecot"]) {
        return;
    }
    let (dovecot, smtp) = (Dovecot::start(false).await, Smtp::start().await);
    let relay = Relay::start(dovecot.port).await;
    let server = Server::plain("127.0.0.1", relay.port).login("shop", "secret");
    let hub = MemoryHub::new();
    let provider = reading(server).patience(Duration::from_secs(2)).smtp(smtp.server());
    let a = start(&hub, provider, echo).await;
    a.bot.ready().await;
    dovecot.deliver(mail(ANN, "1@a.example", "s", "one"));
    until("it is answered", || smtp.texts(ANN) == ["echo: one"]).await;
    let before = relay.opened();
    relay.silence();
    dovecot.deliver(mail(ANN, "2@a.example", "s", "two"));
    until("it is picked up", || smtp.texts(ANN) == ["echo: one", "echo: two"]).await;
    assert!(relay.opened() > before, "by another connection");
    // A server that goes away and comes back is no other one.
    relay.silence_all();
    dovecot.deliver(mail(ANN, "3@a.example", "s", "three"));
    let tried = relay.opened();
    until("it tries again", || relay.opened() >= tried + 2).await;
    relay.go_on();
    until("it goes on", || smtp.texts(ANN).len() == 3).await;
    assert_eq!(smtp.texts(ANN)[2], "echo: three");
}

#[tokio::test]
async fn d4_a_server_that_does_not_tell_of_mail_is_asked() {
    if !have(&["dovecot"]) {
        return;
    }
    let (dovecot, smtp) = (Dovecot::start_without_idle().await, Smtp::start().await);
    let a = start(&MemoryHub::new(), reading(dovecot.server()).smtp(smtp.server()), echo).await;
    a.bot.ready().await;
    for text in ["one", "two"] {
        dovecot.deliver(mail(ANN, &format!("{text}@a.example"), "s", text));
        until("it is answered", || smtp.texts(ANN).last() == Some(&format!("echo: {text}"))).await;
    }
}

#[tokio::test]
async fn case_w20_mail_is_neither_skipped_nor_answered_twice_wherever_its_reader_is_killed() {
    if !have(&["dovecot"]) {
        return;
    }
    let (dovecot, smtp) = (Dovecot::start(false).await, Smtp::start().await);
    let relay = Relay::start(dovecot.port).await;
    let server = || Server::plain("127.0.0.1", relay.port).login("shop", "secret");
    let provider = || {
        let patience = Duration::from_secs(120);
        reading(server()).patience(patience).smtp(smtp.server()).from_the_beginning()
    };
    let clock = ManualClock::new();
    let hub = MemoryHub::with_clock(clock.clone());
    let (at_work, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let turns: Arc<Mutex<Vec<String>>> = Arc::default();
    let slow = |bot: BotBuilder| {
        let (at_work, gate, turns) = (at_work.clone(), gate.clone(), turns.clone());
        bot.on(Route::Any, async move |ctx| {
            turns.lock().push(ctx.text().to_owned());
            if ctx.text() == "slow" {
                at_work.notify_one();
                gate.notified().await;
            }
            let said = format!("echo: {}", ctx.text());
            Ok(ctx.reply(said).await?)
        })
    };
    // Between fetch and commit: what the server told is on its way when the reader dies.
    let a = start(&hub, provider(), slow).await;
    a.bot.ready().await;
    let b = start(&hub, provider(), slow).await;
    relay.silence();
    dovecot.deliver(mail(ANN, "1@a.example", "s", "fetched"));
    a.coordinator.crash();
    past_lease(&clock).await;
    relay.go_on();
    until("the next reader gets it", || smtp.texts(ANN) == ["echo: fetched"]).await;
    assert_eq!(*turns.lock(), ["fetched"]);

    // Between commit and reply: the cursor is past it, and it is in the journal.
    let c = start(&hub, provider(), echo).await;
    dovecot.deliver(mail(ANN, "2@a.example", "s", "slow"));
    tokio::time::timeout(super::mail::PATIENCE, at_work.notified()).await.expect("it is at work");
    b.coordinator.crash();
    past_lease(&clock).await;
    until("another answers", || smtp.texts(ANN).len() == 2).await;
    gate.notify_waiters();
    dovecot.deliver(mail(ANN, "3@a.example", "s", "after"));
    until("and reads on", || smtp.texts(ANN).len() >= 3).await;
    assert_eq!(smtp.texts(ANN), ["echo: fetched", "echo: slow", "echo: after"]);
    drop((a, b, c));
}

#[tokio::test]
async fn case_w21_a_rebuilt_mailbox_brings_nothing_old_and_loses_nothing_new() {
    if !have(&["dovecot"]) {
        return;
    }
    let (mut dovecot, smtp) = (Dovecot::start(false).await, Smtp::start().await);
    // There before the first start: one with an id, one without.
    let unnamed = "From: ann@a.example\r\nSubject: s\r\n\r\nunnamed\r\n";
    dovecot.deliver(mail(ANN, "old@a.example", "s", "old"));
    dovecot.deliver(unnamed);
    let hub = MemoryHub::new();
    let provider = |dovecot: &Dovecot| reading(dovecot.server()).smtp(smtp.server());
    let a = start(&hub, provider(&dovecot), echo).await;
    a.bot.ready().await;
    // Two that are the same to the byte, and a third that the old one is like: all are meant.
    dovecot.deliver(mail(ANN, "1@a.example", "s", "one"));
    dovecot.deliver(unnamed);
    dovecot.deliver(unnamed);
    until("all three are answered", || smtp.texts(ANN).len() >= 3).await;
    assert_eq!(smtp.texts(ANN), ["echo: one", "echo: unnamed", "echo: unnamed"]);
    let before: Vec<_> = smtp.taken().iter().map(|mail| field(&mail.raw, "Message-ID")).collect();
    assert!(before[1] != before[2], "two replies, not one twice");
    a.bot.stop().await.unwrap();

    for validity in [7_000_000, 8_000_000] {
        dovecot.stop();
        dovecot.rebuild(validity);
        dovecot.deliver(mail(ANN, &format!("new{validity}@a.example"), "s", "new"));
        dovecot.deliver(unnamed);
        dovecot.restart().await;
        let already = smtp.texts(ANN).len();
        let b = start(&hub, provider(&dovecot), echo).await;
        until("what is new is answered", || smtp.texts(ANN).len() >= already + 2).await;
        dovecot.deliver(mail(ANN, &format!("last{validity}@a.example"), "s", "last"));
        until("it reads on", || smtp.texts(ANN).len() >= already + 3).await;
        assert_eq!(smtp.texts(ANN)[already..], ["echo: new", "echo: unnamed", "echo: last"]);
        b.bot.stop().await.unwrap();
    }
}

#[tokio::test]
async fn case_w22_two_programs_do_not_answer_each_other_for_ever() {
    if !have(&["dovecot"]) {
        return;
    }
    let (dovecot, smtp) = (Arc::new(Dovecot::start(false).await), Smtp::start().await);
    // Whoever is away says so to every mail, at once. One says that a program wrote it.
    let answering = dovecot.clone();
    smtp.tell(move |taken| {
        let n = field(&taken.raw, "Message-ID").unwrap();
        let n = n.trim_matches(['<', '>']);
        let head = match taken.to.starts_with("honest") {
            true => "Auto-Submitted: auto-replied (vacation)\r\n",
            false => "",
        };
        let note = mail(&taken.to, &format!("away.{n}"), "Re: away", "I am away.");
        answering.deliver(format!("{head}{note}"));
    });
    let hub = MemoryHub::new();
    let provider = Email::new("mail", "bot@shop.example").unwrap();
    let provider = provider.imap(dovecot.server(), "INBOX").smtp(smtp.server());
    let a = start(&hub, provider.probe_every(Duration::from_secs(2)), echo).await;
    let told = errors(a.bot.events());
    a.bot.ready().await;
    dovecot.deliver(format!(
        "Auto-Submitted: auto-replied\r\n{}",
        mail("away@v.example", "v1@v.example", "away", "I am away.")
    ));
    dovecot.deliver(mail("honest@v.example", "v2@v.example", "s", "hello"));
    dovecot.deliver(mail("sly@v.example", "v3@v.example", "s", "hello"));
    until("the loop is told of", || told.lock().iter().any(|why| why.contains("turns_max"))).await;
    dovecot.deliver(mail(ANN, "m@a.example", "s", "still there?"));
    until("others are answered", || !smtp.texts(ANN).is_empty()).await;
    assert_eq!(smtp.texts("away@v.example").len(), 0);
    assert_eq!(smtp.texts("honest@v.example"), ["echo: hello"]);
    assert_eq!(smtp.texts("sly@v.example").len(), 3, "{:?}", smtp.texts("sly@v.example"));
    until("honest ones are counted", || figure(&a.bot, "unknown_events") == 2).await;
    a.bot.stop().await.unwrap();
}

#[tokio::test]
async fn case_w2_a_bad_mail_leaves_the_others() {
    if !have(&["dovecot"]) {
        return;
    }
    let (dovecot, smtp) = (Dovecot::start(false).await, Smtp::start().await);
    dovecot.deliver(mail(ANN, "1@a.example", "s", "one"));
    dovecot.deliver(format!("From: eve@e.example\r\n{}", mail(ANN, "2@a.example", "s", "two")));
    dovecot.deliver(mail(ANN, "3@a.example", "s", &"x".repeat(70_000)));
    dovecot.deliver(mail(ANN, "4@a.example", "s", "four"));
    let hub = MemoryHub::new();
    let provider = reading(dovecot.server()).smtp(smtp.server()).from_the_beginning();
    let a = start(&hub, provider.bytes_max(60_000), echo).await;
    let told = errors(a.bot.events());
    until("the good ones are answered", || smtp.texts(ANN).len() >= 2).await;
    dovecot.deliver(mail(ANN, "5@a.example", "s", "five"));
    until("it reads on", || smtp.texts(ANN).len() >= 3).await;
    assert_eq!(smtp.texts(ANN), ["echo: one", "echo: four", "echo: five"]);
    assert_eq!(figure(&a.bot, "errors"), 2, "one for each: {:?}", told.lock());
    a.bot.stop().await.unwrap();
}

#[tokio::test]
async fn d4_tls_is_asked_for_and_kept_to() {
    if !have(&["dovecot", "openssl"]) {
        return;
    }
    let (dovecot, smtp) = (Dovecot::start(true).await, Smtp::start().await);
    let root = dovecot.root_certificate();
    let secured = [
        Server::tls("localhost", dovecot.tls_port).root_certificate(root.clone()),
        Server::starttls("localhost", dovecot.port).root_certificate(root),
    ];
    for (n, server) in secured.into_iter().enumerate() {
        let hub = MemoryHub::new();
        let provider = reading(server.login("shop", "secret")).smtp(smtp.server());
        let a = start(&hub, provider, echo).await;
        tokio::time::timeout(super::mail::PATIENCE, a.bot.ready()).await.expect("it gets in");
        dovecot.deliver(mail(ANN, &format!("{n}@a.example"), "s", &n.to_string()));
        until("it is answered", || smtp.texts(ANN).last() == Some(&format!("echo: {n}"))).await;
        a.bot.stop().await.unwrap();
    }
    // A certificate of nobody that is known, and plain text to another machine.
    for refused in [
        Server::tls("localhost", dovecot.tls_port),
        Server::starttls("localhost", dovecot.port),
        Server::plain("192.0.2.1", dovecot.port),
        Server::plain("127.0.0.1", dovecot.port).login("shop", "wrong"),
    ] {
        let what = format!("{refused:?}");
        let provider = reading(refused).patience(Duration::from_secs(5));
        let a = start(&MemoryHub::new(), provider, echo).await;
        let ready = tokio::time::timeout(Duration::from_millis(300), a.bot.ready()).await;
        assert!(ready.is_err(), "{what} is let in");
        a.bot.stop().await.unwrap();
    }
}

#[tokio::test]
async fn d4_a_send_by_smtp_is_made_again_where_that_is_safe() {
    let smtp = Smtp::start().await;
    let clock = ManualClock::new();
    let hub = MemoryHub::with_clock(clock.clone());
    let make = |bot: BotBuilder| {
        bot.on(Route::Any, async |ctx| {
            for part in 1..=3 {
                ctx.reply(format!("{} {part}", ctx.text())).await?;
            }
            Ok(())
        })
    };
    let provider = email().smtp(smtp.server());
    let a = start(&hub, provider.clone(), make).await;
    let told = errors(a.bot.events());
    let all = async |count: usize| {
        let sent = async {
            while smtp.taken().len() < count {
                // A lease that runs out while somebody sends would leave that open.
                if !smtp.is_busy() {
                    clock.advance(Duration::from_millis(200));
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(super::mail::PATIENCE, sent).await.expect("they go out");
    };
    // "Later", a connection that ends too early: the order is kept, and nothing comes twice.
    smtp.fail_next(Fault::Rcpt("450 4.2.0 greylisted, come again"));
    smtp.fail_next(Fault::Text("451 4.3.0 busy"));
    smtp.fail_next(Fault::ClosesBefore);
    let began = clock.wall_ms();
    hand_in(&provider, mail(ANN, "1@a.example", "s", "a").as_bytes()).await.unwrap();
    all(3).await;
    assert_eq!(smtp.texts(ANN), ["a 1", "a 2", "a 3"]);
    assert!(clock.wall_ms() - began >= 60_000, "it waited twice");
    // "No" is told, and the next goes out.
    smtp.fail_next(Fault::Rcpt("550 5.1.1 nobody of that name"));
    hand_in(&provider, mail(ANN, "2@a.example", "s", "b").as_bytes()).await.unwrap();
    all(5).await;
    assert_eq!(smtp.texts(ANN)[3..], ["b 2", "b 3"]);
    until("it is told", || told.lock().iter().any(|why| why.contains("nobody of that"))).await;
    // Taken, and nobody says so: again, recognisable as the same.
    smtp.fail_next(Fault::TakesAndCloses);
    hand_in(&provider, mail(ANN, "3@a.example", "s", "c").as_bytes()).await.unwrap();
    all(9).await;
    assert_eq!(smtp.texts(ANN)[5..], ["c 1", "c 1", "c 2", "c 3"]);
    let ids: Vec<_> = smtp.taken().iter().map(|mail| field(&mail.raw, "Message-ID")).collect();
    assert_eq!(ids[5], ids[6]);
    let several: std::collections::BTreeSet<_> = ids.iter().collect();
    assert_eq!(several.len(), 8, "each reply has its own");
}

#[tokio::test]
async fn d4_what_is_handed_in_is_taken_at_every_replica_and_once() {
    let smtp = Smtp::start().await;
    let hub = MemoryHub::new();
    let (one, two) = (email().smtp(smtp.server()), email().smtp(smtp.server()));
    let early = one.ingest(mail(ANN, "0@a.example", "s", "x").as_bytes()).await;
    assert!(matches!(early, Err(DeliverError::Unavailable { .. })), "{early:?}");
    let a = start(&hub, one.clone(), echo).await;
    let b = start(&hub, two.clone(), echo).await;
    let said = mail(ANN, "1@a.example", "s", "one");
    assert_eq!(hand_in(&one, said.as_bytes()).await.unwrap(), Ingested::Taken);
    assert_eq!(hand_in(&two, said.as_bytes()).await.unwrap(), Ingested::Duplicate);
    let said = mail(ANN, "2@a.example", "s", "two");
    assert_eq!(hand_in(&two, said.as_bytes()).await.unwrap(), Ingested::Taken);
    until("both are answered", || smtp.texts(ANN).len() >= 2).await;
    let away = format!("Precedence: bulk\r\n{}", mail(ANN, "3@a.example", "s", "away"));
    let kind = "automatic mail".to_owned();
    assert_eq!(hand_in(&two, away.as_bytes()).await.unwrap(), Ingested::Silent { kind });
    let nobody = hand_in(&one, b"Subject: x\r\n\r\nhello\r\n").await;
    assert!(matches!(nobody, Err(DeliverError::Invalid { .. })), "{nobody:?}");
    assert_eq!(smtp.texts(ANN), ["echo: one", "echo: two"]);
    drop((a, b));
}
