//! One run of the provider: from the stored session to the end of the connection.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use whatsapp_rust::bot::{Bot, BotHandle};
use whatsapp_rust::pair_code::PairCodeOptions;
use whatsapp_rust::types::events::{
    ConnectFailureReason, Event, EventHandler, EventInterest, EventKind,
};
use whatsapp_rust::{CacheConfig, Client, Jid, MsgSecretPolicy, RawNodeLease, TokioRuntime};

use super::inbound::Intake;
use super::outbound::Outbound;
use super::pairing::Pairing;
use super::socket::{Http, Sockets};
use super::storage::{Row, Storage};
use super::{AfterUnlinked, WhatsAppWeb};
use crate::provider::outward::Outward;
use crate::provider::{BadItem, Closed, DeliverError, Link, Notice, ProviderError};
use crate::store::Taken;
use crate::types::ChatKey;

/// Says that the account no longer knows this device.
const UNLINKED: &str = "unlinked";
/// How long a connection outlives the bot's intake, for what handlers still have to say.
const LINGER: Duration = Duration::from_secs(30);
/// What the client is to tell.
const WANTED: [EventKind; 16] = [
    EventKind::ClientOutdated,
    EventKind::ConnectFailure,
    EventKind::Connected,
    EventKind::ContactNumberChanged,
    EventKind::Disconnected,
    EventKind::LoggedOut,
    EventKind::PairError,
    EventKind::PairSuccess,
    EventKind::PairingCode,
    EventKind::PairingCodeError,
    EventKind::PairingQrCode,
    EventKind::RawNode,
    EventKind::ServerAck,
    EventKind::StreamReplaced,
    EventKind::TemporaryBan,
    EventKind::UndecryptableMessage,
];

#[derive(Serialize, Deserialize)]
struct Unlinked {
    why: String,
}

/// What became of the connection.
enum News {
    /// The server let this device in.
    In,
    /// The connection is lost; the client makes another.
    Lost,
    /// It is over, in this way.
    Over(Closed),
    /// Somebody has another number from now on: (until now, from now on).
    Moved(ChatKey, ChatKey),
    /// As `Over`: the account no longer knows this device.
    Unlinked(String),
}

/// Passes on what the client tells.
struct Ear {
    whatsapp: WhatsAppWeb,
    link: Link,
    news: mpsc::UnboundedSender<News>,
}

/// A client at work. Dropped, it is disconnected and nothing is stored any more.
struct Connection {
    client: Arc<Client>,
    storage: Storage,
    outbound: Arc<Outbound>,
    running: BotHandle,
    news: mpsc::UnboundedReceiver<News>,
    _raw: RawNodeLease,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.outbound.gone(&self.client);
        self.storage.end(super::storage::Over::Closed);
        self.client.signal_shutdown_sync();
        let client = self.client.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { client.disconnect().await });
        }
    }
}

/// Connects and listens until it is over.
pub(super) async fn run(whatsapp: &WhatsAppWeb, link: Link) -> Result<Closed, ProviderError> {
    let storage = match Storage::open(link.clone(), &whatsapp.id).await {
        Ok(storage) => storage,
        Err(DeliverError::Deposed) => return Ok(Closed::ByPeer),
        Err(error) => return Err(whatsapp.fault(error)),
    };
    if !may_connect(whatsapp, &storage).await? {
        return Ok(Closed::Unlinked);
    }
    let mut connection = connect(whatsapp, &link, storage).await?;
    tokio::select! {
        biased;
        () = link.closing() => {}
        closed = connection.listen(whatsapp, &link) => return Ok(closed),
    }
    if let Err(error) = connection.storage.flush().await {
        tracing::debug!(provider = %whatsapp.id, %error, "rows were not stored at the end");
    }
    // Handlers that still run may have something to say, and its successor's login ends this.
    let (whatsapp, link) = (whatsapp.clone(), link.clone());
    tokio::spawn(async move {
        let listening = connection.listen(&whatsapp, &link);
        // Whichever comes first, the connection is dropped.
        let _ = tokio::time::timeout(LINGER, listening).await;
    });
    Ok(Closed::Asked)
}

/// Whether the stored session may be used; one that was unlinked waits for a person.
async fn may_connect(whatsapp: &WhatsAppWeb, storage: &Storage) -> Result<bool, ProviderError> {
    let Some(row) = storage.get(UNLINKED) else { return Ok(true) };
    let Unlinked { why } = row.read().map_err(|error| whatsapp.fault(error))?;
    let done = match whatsapp.after_unlinked {
        AfterUnlinked::StayDown => {
            let way_out = "start it with AfterUnlinked::LinkAnew, and scan the code";
            tracing::error!(provider = %whatsapp.id, %why, way_out, "unlinked; it stays down");
            return Ok(false);
        }
        AfterUnlinked::TryAgain => storage.write(vec![(UNLINKED.to_owned(), None)]).await,
        AfterUnlinked::LinkAnew => storage.wipe().await,
    };
    done.map_err(|error| whatsapp.fault(error))?;
    Ok(true)
}

async fn connect(
    whatsapp: &WhatsAppWeb,
    link: &Link,
    storage: Storage,
) -> Result<Connection, ProviderError> {
    let (sender, news) = mpsc::unbounded_channel();
    let ear = Ear { whatsapp: whatsapp.clone(), link: link.clone(), news: sender };
    let intake = Intake { id: whatsapp.id.clone(), link: link.clone(), storage: storage.clone() };
    let caches = CacheConfig {
        // Edits, reactions and votes make no turn, so the secrets to read them by are not kept.
        msg_secret_policy: MsgSecretPolicy::BotOnly,
        seed_msg_secrets_from_history: false,
        ..CacheConfig::default()
    };
    let mut building = Bot::builder()
        .with_backend(storage.clone())
        .with_transport_factory(Sockets { url: whatsapp.url.clone() })
        .with_http_client(Http(Outward::new()))
        .with_runtime(TokioRuntime)
        .with_inbound_durability_hook(intake)
        .with_event_handler(ear)
        .with_cache_config(caches)
        .skip_history_sync();
    if let Some(version) = whatsapp.version {
        building = building.with_version(version);
    }
    if let Some(count) = whatsapp.prekeys {
        building = building.with_wanted_pre_key_count(count);
    }
    let linked = storage.device().map_err(|error| whatsapp.fault(error))?;
    if let Some(number) = &whatsapp.number
        && !linked.is_some_and(|device| device.is_registered())
    {
        let phone_number = number.clone();
        building = building.with_pair_code(PairCodeOptions { phone_number, ..Default::default() });
    }
    let bot = building.build().await.map_err(|error| whatsapp.fault(error))?;
    let client = bot.client();
    let raw = client.acquire_raw_node_forwarding();
    whatsapp.outbound.by(client.clone());
    let outbound = whatsapp.outbound.clone();
    let running = bot.spawn();
    Ok(Connection { client, storage, outbound, running, news, _raw: raw })
}

/// What is kept of a chat goes on under its new number (SPEC B2).
async fn move_chat(whatsapp: &WhatsAppWeb, link: &Link, from: ChatKey, to: ChatKey) {
    let notice = match link.rekey(&from, &to, Taken::KeepNew).await {
        Ok(()) => Notice::Moved { from, to },
        Err(error) => Notice::Bad(BadItem { at: format!("chat {from}"), why: error.to_string() }),
    };
    link.notice(&whatsapp.id, notice);
}

impl Connection {
    /// Until it is over.
    async fn listen(&mut self, whatsapp: &WhatsAppWeb, link: &Link) -> Closed {
        loop {
            let news = tokio::select! {
                biased;
                news = self.news.recv() => news,
                _ = self.storage.riding() => return Closed::ByPeer,
                () = &mut self.running => {
                    // What it told before it ended counts.
                    self.news.try_recv().ok().or(Some(News::Over(Closed::ByPeer)))
                }
            };
            match news {
                Some(News::In) => link.connected(&whatsapp.id, true),
                Some(News::Lost) => link.connected(&whatsapp.id, false),
                Some(News::Moved(from, to)) => move_chat(whatsapp, link, from, to).await,
                Some(News::Over(closed)) => return closed,
                Some(News::Unlinked(why)) => {
                    self.unlinked(whatsapp, why).await;
                    return Closed::Unlinked;
                }
                None => return Closed::ByPeer,
            }
        }
    }

    /// Remembers it, for whichever replica leads next. The session stays as it is: a person decides
    /// what is to become of it.
    async fn unlinked(&self, whatsapp: &WhatsAppWeb, why: String) {
        let row = Row::json(&Unlinked { why });
        let noted = match row {
            Ok(row) => self.storage.write(vec![(UNLINKED.to_owned(), Some(row))]).await,
            Err(error) => Err(error),
        };
        if let Err(error) = noted {
            tracing::debug!(provider = %whatsapp.id, %error, "that it is unlinked is not stored");
        }
    }
}

impl Ear {
    fn tell(&self, news: News) {
        // The connection may be over.
        let _ = self.news.send(news);
    }

    fn pairing(&self, step: Pairing) {
        tracing::warn!(provider = %self.whatsapp.id, ?step, "pairing");
        (self.whatsapp.on_pairing)(&step);
    }
}

impl EventHandler for Ear {
    fn handle_event(&self, event: Arc<Event>) {
        match &*event {
            Event::RawNode(node) if node.tag() == "success" => self.tell(News::In),
            Event::Connected(_) => self.tell(News::In),
            Event::Disconnected(_) => {
                self.whatsapp.outbound.lost();
                self.tell(News::Lost);
            }
            Event::ServerAck(ack)
                if ack.class.as_deref().is_none_or(|class| class == "message") =>
            {
                self.whatsapp.outbound.answered(&ack.id, ack.error.clone());
            }
            Event::ContactNumberChanged(changed) => {
                let chat = |jid: &Jid| self.whatsapp.chat(&jid.to_non_ad_string());
                self.tell(News::Moved(chat(&changed.old_jid), chat(&changed.new_jid)));
            }
            Event::StreamReplaced(_) => self.tell(News::Over(Closed::Replaced)),
            Event::LoggedOut(out) if out.reason == ConnectFailureReason::AccountLocked => {
                self.tell(News::Over(Closed::Refused("WhatsApp has locked the account")));
            }
            Event::LoggedOut(out) => self.tell(News::Unlinked(format!("{:?}", out.reason))),
            Event::TemporaryBan(_) => {
                let why = "WhatsApp has banned the account for some time";
                self.tell(News::Over(Closed::Refused(why)));
            }
            Event::ClientOutdated(_) => {
                let why = "WhatsApp no longer takes this version of the client; update it";
                self.tell(News::Over(Closed::Refused(why)));
            }
            Event::ConnectFailure(failure) if !failure.reason.should_reconnect() => {
                let (id, reason) = (&self.whatsapp.id, &failure.reason);
                tracing::warn!(provider = %id, ?reason, "WhatsApp refuses the login");
                self.tell(News::Over(Closed::Refused("WhatsApp refuses the login; see the log")));
            }
            Event::PairingQrCode(qr) => {
                self.pairing(Pairing::Qr { code: qr.code.clone(), valid: qr.timeout });
            }
            Event::PairingCode(code) => {
                self.pairing(Pairing::Code { code: code.code.clone(), valid: code.timeout });
            }
            Event::PairingCodeError(error) => {
                self.pairing(Pairing::Failed { why: error.error.clone() });
            }
            Event::PairError(error) => self.pairing(Pairing::Failed { why: error.error.clone() }),
            Event::PairSuccess(linked) => {
                self.pairing(Pairing::Linked { account: linked.id.to_string() });
            }
            Event::UndecryptableMessage(message) => {
                let at = format!("message {:?}", message.info.id);
                let bad = BadItem { at, why: "it could not be decrypted".to_owned() };
                self.link.notice(&self.whatsapp.id, Notice::Bad(bad));
            }
            _ => {}
        }
    }

    fn interest(&self) -> EventInterest {
        EventInterest::of(&WANTED)
    }
}
