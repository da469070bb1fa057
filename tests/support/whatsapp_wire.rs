//! The fake WhatsApp's side of a connection: frames on a WebSocket, and the Noise handshake of one who
//! logs in: XX, where the server's key is not known yet, and IK, where it is.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::{SinkExt, StreamExt};
use rand_10 as rand;
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message as Frame;
use whatsapp_rust::buffa::{Message as _, MessageField};
use whatsapp_rust::wacore::framing::{FrameDecoder, encode_frame};
use whatsapp_rust::wacore::handshake::NoiseHandshake;
use whatsapp_rust::wacore::libsignal::protocol::KeyPair;
use whatsapp_rust::wacore::noise::NoiseCipher;
use whatsapp_rust::wacore_binary::consts::{NOISE_PATTERN_IK, NOISE_PATTERN_XX, WA_CONN_HEADER};
use whatsapp_rust::waproto::whatsapp as wa;

/// One login or registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Login {
    pub noise: Vec<u8>,
    /// The user, where it logged in.
    pub user: Option<u64>,
    /// With the server's key known beforehand.
    pub resumed: bool,
}

/// A connection's frames.
pub struct Wire {
    socket: WebSocketStream<TcpStream>,
    decoder: FrameDecoder,
    begun: bool,
}

impl Wire {
    pub async fn accept(stream: TcpStream) -> Option<Self> {
        let socket = tokio_tungstenite::accept_async(stream).await.ok()?;
        Some(Self { socket, decoder: FrameDecoder::new(), begun: false })
    }

    /// Closes it, and reads on until the other side has, too: what is not read would have the system
    /// reset the connection, and the other side lose what it was told last.
    pub async fn close(&mut self) -> Option<()> {
        self.socket.close(None).await.ok()?;
        let rest = async { while let Some(Ok(_)) = self.socket.next().await {} };
        tokio::time::timeout(Duration::from_secs(5), rest).await.ok()
    }

    /// The next frame; `None` at the end.
    pub async fn next(&mut self) -> Option<BytesMut> {
        loop {
            if let Some(frame) = self.decoder.decode_frame() {
                return Some(frame);
            }
            match self.socket.next().await?.ok()? {
                Frame::Binary(bytes) => {
                    let bytes = match std::mem::replace(&mut self.begun, true) {
                        false => bytes.strip_prefix(&WA_CONN_HEADER[..])?.to_vec(),
                        true => bytes.to_vec(),
                    };
                    self.decoder.feed(&bytes);
                }
                Frame::Close(_) => return None,
                _ => {}
            }
        }
    }

    pub async fn send(&mut self, payload: &[u8]) -> Option<()> {
        let framed = encode_frame(payload, None).ok()?;
        self.socket.send(Frame::Binary(Bytes::from(framed))).await.ok()
    }
}

fn raw(keys: &KeyPair) -> [u8; 32] {
    keys.public_key.public_key_bytes().try_into().unwrap()
}

/// A certificate of the server's key, signed by nobody.
fn certificate(key: &[u8]) -> Vec<u8> {
    use wa::cert_chain::{NoiseCertificate, noise_certificate::Details};
    let signed = |serial, issuer, key: &[u8]| {
        let details = Details {
            serial: Some(serial),
            issuer_serial: Some(issuer),
            key: Some(key.to_vec()),
            not_before: Some(1_700_000_000),
            not_after: Some(4_000_000_000),
        };
        let (details, signature) = (Some(details.encode_to_vec()), Some(vec![0; 64]));
        MessageField::some(NoiseCertificate { details, signature })
    };
    let (leaf, intermediate) = (signed(2, 1, key), signed(1, 0, &[0xcc; 32]));
    wa::CertChain { leaf, intermediate }.encode_to_vec()
}

impl Wire {
    /// The handshake: ciphers to read and to write with, the client's payload, and how it logged in.
    pub async fn shake(
        &mut self,
        own: &KeyPair,
    ) -> Option<(NoiseCipher, NoiseCipher, wa::ClientPayload, Login)> {
        let hello = wa::HandshakeMessage::decode_from_slice(&self.next().await?).ok()?;
        let hello = hello.client_hello.into_option()?;
        let theirs: [u8; 32] = hello.ephemeral?.try_into().ok()?;
        let (ephemeral, resumed) = (KeyPair::generate(&mut rand::rng()), hello.r#static.is_some());
        let pattern = if resumed { NOISE_PATTERN_IK } else { NOISE_PATTERN_XX };
        let mut noise = NoiseHandshake::new(pattern, &WA_CONN_HEADER).ok()?;
        let (mut client, mut payload) = (Vec::new(), Vec::new());
        if resumed {
            noise.authenticate(&raw(own));
            noise.authenticate(&theirs);
            noise.mix_shared_secret(own.private_key.serialize(), &theirs).ok()?;
            client = noise.decrypt(&hello.r#static?).ok()?;
            noise.mix_shared_secret(own.private_key.serialize(), &client).ok()?;
            payload = noise.decrypt(&hello.payload?).ok()?;
        } else {
            noise.authenticate(&theirs);
        }
        noise.authenticate(&raw(&ephemeral));
        noise.mix_shared_secret(ephemeral.private_key.serialize(), &theirs).ok()?;
        let mut sealed = None;
        if resumed {
            noise.mix_shared_secret(ephemeral.private_key.serialize(), &client).ok()?;
        } else {
            sealed = Some(noise.encrypt(&raw(own)).ok()?);
            noise.mix_shared_secret(own.private_key.serialize(), &theirs).ok()?;
        }
        let certificate = noise.encrypt(&certificate(&raw(own))).ok()?;
        let server_hello = wa::handshake_message::ServerHello {
            ephemeral: Some(raw(&ephemeral).to_vec()),
            r#static: sealed,
            payload: Some(certificate),
            ..Default::default()
        };
        let server_hello = MessageField::some(server_hello);
        let answer = wa::HandshakeMessage { server_hello, ..Default::default() };
        self.send(&answer.encode_to_vec()).await?;
        if !resumed {
            let finish = wa::HandshakeMessage::decode_from_slice(&self.next().await?).ok()?;
            let finish = finish.client_finish.into_option()?;
            client = noise.decrypt(&finish.r#static?).ok()?;
            noise.mix_shared_secret(ephemeral.private_key.serialize(), &client).ok()?;
            payload = noise.decrypt(&finish.payload?).ok()?;
        }
        let (read, write) = noise.finish().ok()?;
        let payload = wa::ClientPayload::decode_from_slice(&payload).ok()?;
        let login = Login { noise: client, user: payload.username, resumed };
        Some((read, write, payload, login))
    }
}
