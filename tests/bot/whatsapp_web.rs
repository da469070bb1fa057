//! WhatsApp Web against a fake server that speaks its handshake, its stanzas and Signal: linking, what is
//! said and answered, who is connected, and what becomes of a session.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use botmesh::bot::{Bot, BotBuilder, Coordination, Event, Route};
use botmesh::clock::{Clock, ManualClock};
use botmesh::coordinator::LostReason;
use botmesh::provider::whatsapp_web::{AfterUnlinked, Pairing, Storage, WhatsAppWeb};
use botmesh::provider::{
    Capabilities, Closed, Delivery, Link, Provider, ProviderError, SendError, SentId, Webhook,
};
use botmesh::store::{Store, Table};
use botmesh::testing::{CoordinatorOptions, MemoryCoordinator, MemoryHub};
use botmesh::types::{ChatKey, Fence};
use parking_lot::Mutex;
use whatsapp_rust::traits::{DeviceStore, SignalStore};
use whatsapp_rust::wacore::store::Device;

use super::support::{PAST_LEASE, next_event};
use super::whatsapp_api::WhatsAppApi;
use super::whatsapp_people::{picture, reaction, text};

/// Longer than anything here takes on a loaded machine: a login makes keys and asks a dozen things.
pub const LONG: Duration = Duration::from_secs(60);
const GROUP: &str = "120363000000000001@g.us";

/// Steps of linking that were told.
pub type Steps = Arc<Mutex<Vec<Pairing>>>;

/// A replica's provider; the phone scans whatever it shows.
pub fn whatsapp(api: &Arc<WhatsAppApi>, steps: &Steps) -> WhatsAppWeb {
    let (phone, told) = (Arc::downgrade(api), steps.clone());
    WhatsAppWeb::new("wa").base_url(&api.url).version((2, 3000, 1)).one_time_keys(16).on_pairing(
        move |step| {
            told.lock().push(step.clone());
            if let (Pairing::Qr { code, .. }, Some(phone)) = (step, phone.upgrade()) {
                phone.scans(code);
            }
        },
    )
}

pub struct Replica {
    pub bot: Bot,
    pub coordinator: MemoryCoordinator,
}

pub async fn start(
    hub: &MemoryHub,
    provider: impl Provider,
    make: impl FnOnce(BotBuilder) -> BotBuilder,
) -> Replica {
    let prefix = MemoryHub::default_prefix();
    let coordinator = MemoryCoordinator::with(hub, prefix.clone(), CoordinatorOptions::default());
    let bot = make(Bot::builder()).provider(provider).store(hub.store(prefix));
    let bot = bot.coordination(Coordination::new(coordinator.clone())).build().await.unwrap();
    bot.start().await.unwrap();
    Replica { bot, coordinator }
}

pub fn echo(bot: BotBuilder) -> BotBuilder {
    bot.on(Route::Any, async |ctx| {
        let said = format!("echo: {}", ctx.text());
        Ok(ctx.reply(said).await?)
    })
}

/// Waits until something holds. Not by turns of the runtime: crypto runs meanwhile.
pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let waited = tokio::time::timeout(LONG, async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what}: not within {LONG:?}");
}

/// A device is linked, and the server has its keys.
pub async fn linked(api: &WhatsAppApi) {
    eventually("it is linked", async || api.connected() == 1 && api.has_keys()).await;
}

/// Somebody is shown just these texts next; with the ids they came under.
pub async fn hears(api: &WhatsAppApi, user: &str, texts: &[&str]) -> Vec<String> {
    let mut heard = Vec::new();
    eventually(&format!("{user} hears {texts:?}"), async || {
        heard.extend(api.heard(user).await);
        heard.len() >= texts.len()
    })
    .await;
    let said: Vec<&str> = heard.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(said, texts, "{user}");
    heard.into_iter().map(|(id, _)| id).collect()
}

/// Lets the bots' time pass, in steps that the living keep up with.
pub async fn pass(clock: &ManualClock, time: Duration) {
    for _ in 0..time.as_millis().div_ceil(250) {
        clock.advance(Duration::from_millis(250));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Everything kept of the provider, as it is stored.
pub async fn rows(hub: &MemoryHub) -> Vec<(String, Vec<u8>)> {
    let store = hub.store(MemoryHub::default_prefix());
    let all = store.scan(Table::Kv, None, 100_000).await.unwrap().into_iter();
    all.filter(|(row, _)| row.key.starts_with("botmesh.kept:wa:"))
        .map(|(row, content)| (row.key, content.value))
        .collect()
}

#[tokio::test]
async fn d4_a_bot_is_linked_by_its_code_and_answers_those_who_write() {
    let (hub, api, steps) =
        (MemoryHub::new(), Arc::new(WhatsAppApi::start().await), Steps::default());
    let seen: Arc<Mutex<Vec<(ChatKey, String, String)>>> = Arc::default();
    let noted = seen.clone();
    let make = |bot: BotBuilder| {
        bot.on(Route::Any, async move |ctx| {
            let message = ctx.message();
            noted.lock().push((message.chat.clone(), message.kind.clone(), message.id.clone()));
            Ok(ctx.reply(format!("echo: {}", ctx.text())).await?)
        })
    };
    let a = start(&hub, whatsapp(&api, &steps), make).await;
    linked(&api).await;
    a.bot.ready().await;
    let told = steps.lock().clone();
    let [Pairing::Qr { code, .. }, Pairing::Linked { account }] = &told[..] else {
        panic!("{told:?}")
    };
    assert!(code.starts_with("2@ref1,") && account.starts_with("15550000"), "{account}");
    let logins = api.logins();
    assert_eq!(logins.iter().map(|login| login.user).collect::<Vec<_>>(), [None, Some(15_550_000)]);

    api.person("15550001");
    api.says("15550001", None, "A1", &text("hi")).await;
    hears(&api, "15550001", &["echo: hi"]).await;
    api.says("15550001", None, "A2", &reaction("+")).await;
    api.says("15550001", None, "A3", &picture("my cat")).await;
    let ids = hears(&api, "15550001", &["echo: my cat"]).await;
    assert!(ids[0].starts_with("3EB0") && ids[0].len() == 22, "{ids:?}");
    eventually("all are acknowledged", async || api.acknowledged() == ["A1", "A2", "A3"]).await;

    // In a group each has a chat of their own.
    api.says("15550001", Some(GROUP), "G1", &text("all")).await;
    eventually("it is handled", async || seen.lock().len() == 3).await;
    let seen = seen.lock().clone();
    let ann = ChatKey::new("wa", "15550001@s.whatsapp.net");
    let of = |chat: ChatKey, kind: &str, id: &str| (chat, kind.to_owned(), id.to_owned());
    let expected = [
        of(ann.clone(), "text", "15550001@s.whatsapp.net/A1"),
        of(ann.clone(), "image", "15550001@s.whatsapp.net/A3"),
        of(
            ChatKey::new("wa", GROUP).participant("15550001@s.whatsapp.net"),
            "text",
            &format!("{GROUP}/15550001@s.whatsapp.net/G1"),
        ),
    ];
    assert_eq!(seen, expected);
    assert_eq!(whatsapp(&api, &steps).chat("15550001"), ann);
}

#[tokio::test]
async fn b2_a_chat_moves_when_its_number_becomes_known_and_when_it_changes() {
    let (hub, api) = (MemoryHub::new(), Arc::new(WhatsAppApi::start().await));
    let steps = Steps::default();
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let noted = seen.clone();
    let make = |bot: BotBuilder| {
        bot.on(Route::Any, async move |ctx| {
            noted.lock().push(ctx.message().chat.chat.clone());
            Ok(ctx.reply(format!("echo: {}", ctx.text())).await?)
        })
    };
    let a = start(&hub, whatsapp(&api, &steps), make).await;
    linked(&api).await;
    api.person("15550001");
    let mut events = a.bot.events();
    let (id, number) = ("700000000000001@lid", "15550001@s.whatsapp.net");
    api.says_as("15550001", &[("from", id)], "A1", &text("one")).await;
    hears(&api, "15550001", &["echo: one"]).await;
    api.says_as("15550001", &[("from", id), ("sender_pn", number)], "A2", &text("two")).await;
    hears(&api, "15550001", &["echo: two"]).await;
    let mut moved = async || {
        next_event(&mut events, |event| match event {
            Event::ChatMoved { from, to } => Some((from.chat.clone(), to.chat.clone())),
            _ => None,
        })
        .await
    };
    assert_eq!(moved().await, (id.to_owned(), number.to_owned()));
    api.says_as("15550001", &[("from", id)], "A3", &text("three")).await;
    hears(&api, "15550001", &["echo: three"]).await;
    assert_eq!(*seen.lock(), [id, number, number], "by number from then on");
    api.renumbers("15550001", "15550009");
    assert_eq!(moved().await, (number.to_owned(), "15550009@s.whatsapp.net".to_owned()));
}

/// What the module promises: the same identity, the same ratchets, no code to scan.
#[tokio::test]
async fn d5_a_standby_goes_on_as_the_same_device_when_the_leader_dies() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), Arc::new(WhatsAppApi::start().await));
    let steps = Steps::default();
    api.person("15550001");
    let a = start(&hub, whatsapp(&api, &steps), echo).await;
    linked(&api).await;
    let b = start(&hub, whatsapp(&api, &steps), echo).await;
    api.says("15550001", None, "A1", &text("one")).await;
    hears(&api, "15550001", &["echo: one"]).await;
    eventually("it is acknowledged", async || api.acknowledged() == ["A1"]).await;
    let (identity, keys) = (api.identity(), api.one_time_keys());

    a.coordinator.crash();
    eventually("its connection is gone", async || api.connected() == 0).await;
    // Nobody is connected: WhatsApp keeps it.
    api.says("15550001", None, "A2", &text("two")).await;
    pass(&clock, PAST_LEASE).await;
    eventually("the other connects", async || api.connected() == 1).await;
    hears(&api, "15550001", &["echo: two"]).await;
    api.says("15550001", None, "A3", &text("three")).await;
    hears(&api, "15550001", &["echo: three"]).await;
    eventually("all are acknowledged", async || api.acknowledged() == ["A1", "A2", "A3"]).await;

    let logins = api.logins();
    let codes = steps.lock().iter().filter(|step| matches!(step, Pairing::Qr { .. })).count();
    assert_eq!((codes, logins.len()), (1, 3), "{logins:?}");
    assert!(logins.iter().all(|login| login.noise == logins[0].noise), "one device");
    assert!(logins[2].resumed, "it knew the server's key");
    assert_eq!((api.identity(), api.one_time_keys()), (identity, keys), "no keys were made anew");
    drop(b);
}

#[tokio::test]
async fn d5_a_graceful_stop_hands_the_session_on() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), Arc::new(WhatsAppApi::start().await));
    let steps = Steps::default();
    api.person("15550001");
    let a = start(&hub, whatsapp(&api, &steps), echo).await;
    linked(&api).await;
    let b = start(&hub, whatsapp(&api, &steps), echo).await;
    api.says("15550001", None, "A1", &text("one")).await;
    hears(&api, "15550001", &["echo: one"]).await;
    a.bot.stop().await.unwrap();
    // No lease has to end.
    eventually("the other logs in", async || api.logins().len() == 3).await;
    eventually("one is connected", async || api.connected() == 1).await;
    api.says("15550001", None, "A2", &text("two")).await;
    hears(&api, "15550001", &["echo: two"]).await;
    drop(b);
}

/// Which messages a login evicts is WhatsApp's to say; that it does not become a loop is ours.
#[tokio::test]
async fn case_w11_whoever_is_replaced_steps_down_and_comes_back_ever_more_seldom() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), Arc::new(WhatsAppApi::start().await));
    let steps = Steps::default();
    let a = start(&hub, whatsapp(&api, &steps), echo).await;
    linked(&api).await;
    let mut events = a.bot.events();
    for evictions in 1..=4 {
        let logins = api.logins().len();
        api.replaced();
        let lost = next_event(&mut events, |event| match event {
            Event::LeaseLost { key, reason } if key == "provider:wa" => Some(*reason),
            _ => None,
        });
        assert_eq!(lost.await, LostReason::SteppedDown);
        assert_eq!(api.connected(), 0);
        // Until then it does not try.
        let (wait, since) = (Duration::from_secs(3) * 2_u32.pow(evictions), clock.now());
        pass(&clock, wait - Duration::from_secs(1)).await;
        assert_eq!(api.logins().len(), logins, "it came back within {:?}", clock.now() - since);
        eventually("it comes back", async || {
            pass(&clock, Duration::from_millis(500)).await;
            api.connected() == 1
        })
        .await;
        assert_eq!(api.logins().len(), logins + 1);
    }
    assert_eq!(api.evicted(), 4);
}

/// A replica that does not notice that it no longer leads: what it runs goes on.
#[derive(Clone)]
pub struct Lingering {
    inner: WhatsAppWeb,
    pub links: Arc<Mutex<Vec<Link>>>,
    /// Whether what was begun goes on; else it is begun by nobody.
    runs: bool,
}

impl Lingering {
    pub fn new(inner: WhatsAppWeb, runs: bool) -> Self {
        Self { inner, links: Arc::default(), runs }
    }

    pub async fn link(&self) -> Link {
        eventually("it leads", async || !self.links.lock().is_empty()).await;
        self.links.lock()[0].clone()
    }
}

#[async_trait]
impl Provider for Lingering {
    fn id(&self) -> &str {
        self.inner.id()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        self.links.lock().push(link.clone());
        if self.runs {
            let (inner, link) = (self.inner.clone(), link.clone());
            tokio::spawn(async move { inner.run(link).await });
        } else {
            link.connected(self.id(), true);
        }
        link.closing().await;
        Ok(Closed::Asked)
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        self.inner.send(delivery).await
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        None
    }
}

#[tokio::test]
async fn case_w12_the_cut_off_leader_retries_and_the_credentials_are_intact() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), Arc::new(WhatsAppApi::start().await));
    let steps = Steps::default();
    api.person("15550001");
    let cut_off = Lingering::new(whatsapp(&api, &steps), true);
    let a = start(&hub, cut_off.clone(), echo).await;
    linked(&api).await;
    api.says("15550001", None, "A1", &text("one")).await;
    hears(&api, "15550001", &["echo: one"]).await;
    let old = cut_off.link().await;
    let storage = Storage::open(old.clone(), "wa").await.unwrap();
    let mut device = storage.load().await.unwrap().unwrap();

    // The group gives its lead to another; it goes on as if nothing had happened.
    a.coordinator.crash();
    pass(&clock, PAST_LEASE).await;
    let silent = Lingering::new(whatsapp(&api, &steps), false);
    let b = start(&hub, silent.clone(), echo).await;
    silent.link().await;
    let before = rows(&hub).await;
    assert!(before.iter().any(|(key, _)| key.ends_with(":device")), "{} rows", before.len());
    // WhatsApp says that the device is gone: an occasion to tidy up.
    api.unlinks();
    eventually("its connection ends", async || api.connected() == 0).await;
    let logins = api.logins().len();
    for time in 0..20 {
        let ran = cut_off.inner.run(old.clone()).await;
        assert_eq!(ran.unwrap(), Closed::ByPeer, "it is no longer the leader's");
        storage.save(&Device::new()).await.unwrap_err();
        device.push_name = format!("time {time}");
        storage.save(&device).await.unwrap_err();
        storage.put_session("15550001@s.whatsapp.net.0", b"old").await.unwrap_err();
        storage.delete_session("15550001@s.whatsapp.net.0").await.unwrap_err();
        storage.put_identity("15550001@s.whatsapp.net.0", [0; 32]).await.unwrap_err();
    }
    assert_eq!(api.logins().len(), logins, "it does not even ask");
    assert!(before == rows(&hub).await, "every row is as it was");
    drop((a, b));
}

#[tokio::test]
async fn d4_an_unlinked_device_stays_down_says_so_and_keeps_its_keys_until_told() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), Arc::new(WhatsAppApi::start().await));
    let steps = Steps::default();
    let a = start(&hub, whatsapp(&api, &steps), echo).await;
    linked(&api).await;
    a.bot.ready().await;
    let mut events = a.bot.events();
    api.unlinks();
    let said = next_event(&mut events, |event| match event {
        Event::Error { error, .. } => {
            Some(error.to_string()).filter(|said| said.contains("link it again"))
        }
        _ => None,
    });
    let said = said.await;
    assert!(said.contains("wa"), "{said}");
    let logins = api.logins().len();
    pass(&clock, Duration::from_secs(120)).await;
    assert_eq!(api.logins().len(), logins, "it does not try");
    let kept = rows(&hub).await;
    assert!(kept.iter().any(|(key, _)| key.ends_with(":device")));
    assert!(kept.iter().any(|(key, _)| key.ends_with(":unlinked")));
    a.bot.stop().await.unwrap();

    let again = whatsapp(&api, &steps).after_unlinked(AfterUnlinked::LinkAnew);
    let b = start(&hub, again, echo).await;
    eventually("it is linked anew", async || api.connected() == 1).await;
    let logins = api.logins();
    assert_eq!(logins.len(), 4, "{logins:?}");
    assert_eq!(
        (logins[2].user, logins[2].noise == logins[0].noise),
        (None, false),
        "another device"
    );
    b.bot.ready().await;
    assert!(!rows(&hub).await.iter().any(|(key, _)| key.ends_with(":unlinked")));
}

#[tokio::test]
async fn d2_what_whatsapp_refuses_is_told_and_not_asked_for_in_a_loop() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), Arc::new(WhatsAppApi::start().await));
    let steps = Steps::default();
    let a = start(&hub, whatsapp(&api, &steps), echo).await;
    linked(&api).await;
    let mut events = a.bot.events();
    // (a code, what is said of it)
    for (code, part) in [(403, "locked the account"), (405, "version of the client")] {
        api.refuse(Some(code));
        let logins = api.logins().len();
        api.drop_connections();
        let said = async {
            loop {
                pass(&clock, Duration::from_secs(1)).await;
                let said = next_event(&mut events, |event| match event {
                    Event::Error { error, .. } => Some(error.to_string()),
                    _ => None,
                });
                let said = said.await;
                if said.contains(part) {
                    return;
                }
            }
        };
        tokio::time::timeout(LONG, said).await.unwrap_or_else(|_| panic!("{part:?} is told"));
        let tried = api.logins().len();
        assert!(tried > logins);
        pass(&clock, Duration::from_secs(5)).await;
        assert_eq!(api.logins().len(), tried, "not again and again");
        api.refuse(None);
        eventually("it comes back", async || {
            pass(&clock, Duration::from_secs(1)).await;
            api.connected() == 1
        })
        .await;
    }
}

fn delivery(clock: &ManualClock, id: &str, to: &str) -> Delivery {
    Delivery {
        id: id.to_owned(),
        chat: ChatKey::new("wa", to),
        in_reply_to: "A1".to_owned(),
        text: format!("said {id}"),
        fence: Fence(1),
        turn_seq: 1,
        deadline: clock.now() + Duration::from_secs(60),
    }
}

#[tokio::test]
async fn g3_what_becomes_of_a_send_is_told_apart_and_again_is_the_same_message() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), Arc::new(WhatsAppApi::start().await));
    let steps = Steps::default();
    api.person("15550001");
    let whatsapp = whatsapp(&api, &steps);
    let ann = "15550001@s.whatsapp.net";
    let to = |id: &str| delivery(&clock, id, ann);
    let sent = whatsapp.send(&to("0")).await;
    assert!(matches!(sent, Err(SendError::Transport { .. })), "{sent:?}");
    let sent = whatsapp.send(&delivery(&clock, "0", "nobody")).await;
    assert!(matches!(sent, Err(SendError::Refused { .. })), "{sent:?}");
    let a = start(&hub, whatsapp.clone(), echo).await;
    linked(&api).await;
    a.bot.ready().await;

    let SentId(id) = whatsapp.send(&to("1")).await.unwrap();
    api.answers_next(&[Some(479), Some(463), Some(503)]);
    let sent = whatsapp.send(&to("2")).await;
    assert!(matches!(sent, Err(SendError::Refused { .. })), "{sent:?}");
    let sent = whatsapp.send(&to("3")).await;
    assert!(matches!(sent, Err(SendError::WindowClosed { .. })), "{sent:?}");
    let sent = whatsapp.send(&to("4")).await;
    assert!(matches!(sent, Err(SendError::OutcomeUnknown { .. })), "{sent:?}");
    let heard = hears(&api, "15550001", &["said 1", "said 2", "said 3", "said 4"]).await;
    assert_eq!(heard[0], id);

    // It arrived, and the connection ends before that is said.
    api.answers_next(&[None]);
    let sending = {
        let (whatsapp, reply) = (whatsapp.clone(), to("5"));
        tokio::spawn(async move { whatsapp.send(&reply).await })
    };
    eventually("it arrived", async || api.sent().len() == 1).await;
    api.drop_connections();
    let sent = sending.await.unwrap();
    assert!(matches!(sent, Err(SendError::OutcomeUnknown { .. })), "{sent:?}");
    let first = hears(&api, "15550001", &["said 5"]).await;
    eventually("it connects again", async || api.connected() == 1).await;
    let mut again = String::new();
    eventually("it is sent again", async || match whatsapp.send(&to("5")).await {
        Ok(SentId(id)) => {
            again = id;
            true
        }
        Err(_) => false,
    })
    .await;
    assert_eq!(first, [again.clone()], "one message");
    eventually("it comes again", async || {
        api.heard("15550001").await;
        api.again() == [again.clone()]
    })
    .await;
    drop(a);
}
