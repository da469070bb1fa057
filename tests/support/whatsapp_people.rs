//! People on the other side of the fake WhatsApp: each a Signal client of one device, with keys and
//! ratchets of their own; and the phone that the bot is linked to.

use std::collections::HashMap;

use hmac::{Hmac, Mac};
use rand_10 as rand;
use sha2::Sha256;
use whatsapp_rust::async_trait;
use whatsapp_rust::buffa::{Message as _, MessageField};
use whatsapp_rust::wacore::libsignal::protocol::{
    CiphertextMessage, Direction, GenericSignedPreKey, IdentityChange, IdentityKey,
    IdentityKeyPair, IdentityKeyStore, KeyPair, PreKeyBundle, PreKeyId, PreKeyRecord,
    PreKeySignalMessage, PreKeyStore, ProtocolAddress, PublicKey, SessionRecord, SessionStore,
    SignalMessage, SignalProtocolError, SignedPreKeyId, SignedPreKeyRecord, SignedPreKeyStore,
    Timestamp, UsePQRatchet, message_decrypt, message_encrypt, process_prekey_bundle,
};
use whatsapp_rust::wacore::messages::MessageUtils;
use whatsapp_rust::wacore::pair::PairUtils;
use whatsapp_rust::wacore::proto_helpers::{MessageBuilderExt, MessageExt};
use whatsapp_rust::wacore::store::Device;
use whatsapp_rust::wacore_binary::builder::NodeBuilder;
use whatsapp_rust::wacore_binary::{Jid, Node};
use whatsapp_rust::waproto::codec;
use whatsapp_rust::waproto::whatsapp as wa;

type Result<T> = std::result::Result<T, SignalProtocolError>;

/// The number of a person's only one-time key.
const ONE_TIME: u32 = 77;

fn raw(key: &PublicKey) -> [u8; 32] {
    key.public_key_bytes().try_into().unwrap()
}

/// The keys that the bot has given the server, as others are given them.
#[derive(Clone, Debug, Default)]
pub struct Bundle {
    pub registration: u32,
    pub identity: Vec<u8>,
    pub signed: (u32, Vec<u8>, Vec<u8>),
    pub one_time: Vec<(u32, Vec<u8>)>,
}

/// Somebody the bot talks to.
pub struct Person {
    pub jid: Jid,
    device: Device,
    sessions: Sessions,
    identities: Identities,
    keys: Fixed,
}

struct Sessions(HashMap<String, SessionRecord>);

struct Identities {
    own: KeyPair,
    registration: u32,
    known: HashMap<String, IdentityKey>,
}

#[derive(Clone)]
struct Fixed {
    signed: SignedPreKeyRecord,
    one_time: PreKeyRecord,
    one_time_pair: KeyPair,
}

#[async_trait]
impl SessionStore for Sessions {
    async fn load_session(&self, address: &ProtocolAddress) -> Result<Option<SessionRecord>> {
        Ok(self.0.get(address.as_str()).cloned())
    }

    async fn has_session(&self, address: &ProtocolAddress) -> Result<bool> {
        Ok(self.0.contains_key(address.as_str()))
    }

    async fn store_session(&mut self, at: &ProtocolAddress, record: SessionRecord) -> Result<()> {
        self.0.insert(at.as_str().to_owned(), record);
        Ok(())
    }
}

#[async_trait]
impl IdentityKeyStore for Identities {
    async fn get_identity_key_pair(&self) -> Result<IdentityKeyPair> {
        let own = IdentityKey::new(self.own.public_key);
        Ok(IdentityKeyPair::new(own, self.own.private_key.clone()))
    }

    async fn get_local_registration_id(&self) -> Result<u32> {
        Ok(self.registration)
    }

    async fn save_identity(
        &mut self,
        address: &ProtocolAddress,
        identity: &IdentityKey,
    ) -> Result<IdentityChange> {
        let before = self.known.insert(address.as_str().to_owned(), *identity);
        Ok(IdentityChange::from_changed(before.is_some_and(|before| before != *identity)))
    }

    /// Whoever was known once is known by that identity for ever: another one is an error here.
    async fn is_trusted_identity(
        &self,
        address: &ProtocolAddress,
        identity: &IdentityKey,
        _: Direction,
    ) -> Result<bool> {
        Ok(self.known.get(address.as_str()).is_none_or(|known| known == identity))
    }

    async fn get_identity(&self, address: &ProtocolAddress) -> Result<Option<IdentityKey>> {
        Ok(self.known.get(address.as_str()).copied())
    }
}

#[async_trait]
impl PreKeyStore for Fixed {
    async fn get_pre_key(&self, _: PreKeyId) -> Result<PreKeyRecord> {
        Ok(self.one_time.clone())
    }

    async fn save_pre_key(&mut self, _: PreKeyId, _: &PreKeyRecord) -> Result<()> {
        Ok(())
    }

    async fn remove_pre_key(&mut self, _: PreKeyId) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl SignedPreKeyStore for Fixed {
    async fn get_signed_pre_key(&self, _: SignedPreKeyId) -> Result<SignedPreKeyRecord> {
        Ok(self.signed.clone())
    }

    async fn save_signed_pre_key(
        &mut self,
        _: SignedPreKeyId,
        _: &SignedPreKeyRecord,
    ) -> Result<()> {
        Ok(())
    }
}

/// The bot's device as a Signal address.
fn address(bot: &Jid) -> ProtocolAddress {
    use whatsapp_rust::wacore::types::jid::JidExt as _;
    bot.to_protocol_address()
}

impl Person {
    pub fn new(user: &str) -> Self {
        let device = Device::new();
        let signed = SignedPreKeyRecord::new(
            device.signed_pre_key_id.into(),
            Timestamp::from_epoch_millis(0),
            &device.signed_pre_key,
            &device.signed_pre_key_signature,
        );
        let one_time_pair = KeyPair::generate(&mut rand::rng());
        let one_time = PreKeyRecord::new(ONE_TIME.into(), &one_time_pair);
        let identities = Identities {
            own: device.identity_key.clone(),
            registration: device.registration_id,
            known: HashMap::new(),
        };
        let sessions = Sessions(HashMap::new());
        let keys = Fixed { signed, one_time, one_time_pair };
        Self { jid: Jid::pn(user), device, sessions, identities, keys }
    }

    /// Their keys, as the server hands them out.
    pub fn bundle(&self, jid: &Jid) -> Node {
        let id = |id: u32| NodeBuilder::new("id").bytes(id.to_be_bytes()[1..].to_vec()).build();
        let bytes = |tag, bytes: &[u8]| NodeBuilder::new(tag).bytes(bytes.to_vec()).build();
        let device = &self.device;
        let one_time = raw(&self.keys.one_time_pair.public_key);
        NodeBuilder::new("user")
            .attr("jid", jid)
            .children([
                bytes("registration", &device.registration_id.to_be_bytes()),
                bytes("type", &[5]),
                bytes("identity", &raw(&device.identity_key.public_key)),
                NodeBuilder::new("key").children([id(ONE_TIME), bytes("value", &one_time)]).build(),
                NodeBuilder::new("skey")
                    .children([
                        id(device.signed_pre_key_id),
                        bytes("value", &raw(&device.signed_pre_key.public_key)),
                        bytes("signature", &device.signed_pre_key_signature),
                    ])
                    .build(),
            ])
            .build()
    }

    /// Encrypts a text for the bot; a session is begun from its bundle where there is none.
    pub async fn says(&mut self, bot: &Jid, bundle: &mut Bundle, message: &wa::Message) -> Node {
        let address = address(bot);
        if !self.sessions.0.contains_key(address.as_str()) {
            let key = |bytes: &[u8]| PublicKey::from_djb_public_key_bytes(bytes).unwrap();
            let one_time = bundle.one_time.pop();
            let (signed_id, signed, signature) = &bundle.signed;
            let bundle = PreKeyBundle::new(
                bundle.registration,
                0.into(),
                one_time.map(|(id, public)| (id.into(), key(&public))),
                (*signed_id).into(),
                key(signed),
                signature.clone(),
                IdentityKey::new(key(&bundle.identity)),
            );
            process_prekey_bundle(
                &address,
                &mut self.sessions,
                &mut self.identities,
                &bundle.unwrap(),
                &mut rand::rng(),
                UsePQRatchet::No,
            )
            .await
            .unwrap();
        }
        let plain = MessageUtils::encode_and_pad(message);
        let sealed =
            message_encrypt(&plain, &address, &mut self.sessions, &mut self.identities).await;
        let (kind, bytes) = match sealed.unwrap() {
            CiphertextMessage::PreKeySignalMessage(m) => ("pkmsg", m.serialized().to_vec()),
            CiphertextMessage::SignalMessage(m) => ("msg", m.serialized().to_vec()),
            _ => unreachable!("a message to one device is one of the two"),
        };
        NodeBuilder::new("enc").attr("v", "2").attr("type", kind).bytes(bytes).build()
    }

    /// What the bot sent this person, decrypted.
    pub async fn hears(&mut self, bot: &Jid, kind: &str, bytes: &[u8]) -> wa::Message {
        let sealed = match kind {
            "pkmsg" => CiphertextMessage::PreKeySignalMessage(
                PreKeySignalMessage::try_from(bytes).unwrap(),
            ),
            "msg" => CiphertextMessage::SignalMessage(SignalMessage::try_from(bytes).unwrap()),
            other => panic!("a message of kind {other}"),
        };
        let signed = self.keys.clone();
        let opened = message_decrypt(
            &sealed,
            &address(bot),
            &mut self.sessions,
            &mut self.identities,
            &mut self.keys,
            &signed,
            &mut rand::rng(),
            UsePQRatchet::No,
        )
        .await
        .unwrap_or_else(|error| panic!("{} cannot read it: {error}", self.jid));
        let plain = opened.plaintext;
        let padding = usize::from(*plain.last().unwrap());
        codec::message_decode(&plain[..plain.len() - padding]).unwrap()
    }
}

/// A text message.
pub fn text(text: &str) -> wa::Message {
    wa::Message::text(text)
}

/// The text of a message, also where it is the copy for one's own devices.
pub fn text_of(message: &wa::Message) -> String {
    message.get_base_message().text_content().unwrap_or_default().to_owned()
}

/// Decodes base64 with padding.
fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for digit in text.bytes().filter(|byte| *byte != b'=') {
        let value = DIGITS.iter().position(|known| *known == digit).expect("base64");
        bits = (bits << 6) | u32::try_from(value).unwrap();
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from((bits >> count) & 0xff).unwrap());
        }
    }
    bytes
}

/// What a phone makes of a scanned code.
pub struct Scanned {
    /// The connection's reference.
    pub reference: String,
    pub noise: [u8; 32],
    /// The identity of the device, signed by the account: what the server hands on.
    pub signed_identity: Vec<u8>,
}

impl Person {
    /// As the phone of an account: scans a code and signs the new device's identity.
    pub fn scans(&self, code: &str) -> Scanned {
        let (reference, noise, identity) = PairUtils::parse_qr_code(code).unwrap();
        let secret = base64(code.split(',').nth(3).unwrap());
        let details = wa::ADVDeviceIdentity {
            raw_id: Some(1),
            timestamp: Some(1_700_000_000),
            key_index: Some(1),
            ..Default::default()
        }
        .encode_to_vec();
        let signed = [&[6, 0][..], &details, &identity].concat();
        let account = &self.device.identity_key;
        let signature = account.private_key.calculate_signature(&signed, &mut rand::rng());
        let signed = wa::ADVSignedDeviceIdentity {
            details: Some(details),
            account_signature_key: Some(raw(&account.public_key).to_vec()),
            account_signature: Some(signature.unwrap().to_vec()),
            ..Default::default()
        }
        .encode_to_vec();
        let mut mac = Hmac::<Sha256>::new_from_slice(&secret).unwrap();
        mac.update(&signed);
        let sealed = wa::ADVSignedDeviceIdentityHMAC {
            details: Some(signed),
            hmac: Some(mac.finalize().into_bytes().to_vec()),
            ..Default::default()
        };
        Scanned { reference, noise, signed_identity: sealed.encode_to_vec() }
    }
}

/// A reaction to a message.
pub fn reaction(emoji: &str) -> wa::Message {
    let reaction =
        wa::message::ReactionMessage { text: Some(emoji.to_owned()), ..Default::default() };
    wa::Message { reaction_message: MessageField::some(reaction), ..Default::default() }
}

/// A picture with a caption.
pub fn picture(caption: &str) -> wa::Message {
    let image =
        wa::message::ImageMessage { caption: Some(caption.to_owned()), ..Default::default() };
    wa::Message { image_message: MessageField::some(image), ..Default::default() }
}
