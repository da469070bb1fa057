//! The stream by which a follower notices that its leader's process has ended.
//!
//! A follower holds one request open at its leader. The answer is a hello with the token of the
//! leader's process, and then nothing, until the process ends and the kernel closes the connection.
//! What follows tells a death from the rest:
//!
//! | the stream ended, and a new one … | means |
//! |---|---|
//! | … is refused | nobody listens there: a suspicion |
//! | … greets with another token | a supervisor has started the process again: a suspicion |
//! | … greets with the same token | a connection broke, nothing more |
//! | … does not answer, or ends at once | nothing is known; it is tried again |
//!
//! Only a leader that has greeted in this term is suspected: one whose address was never reachable
//! leads as well as it did before.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use futures_util::StreamExt;
use futures_util::stream::{once, pending};
use serde::{Deserialize, Serialize};

use super::member::Member;
use super::node::Inner;
use super::peers::Lane;
use super::server::{Answer, Asked};
use super::types::Vote;
use super::way::Lost;
use super::wire;
use crate::codec::Kind;
use crate::types::{NodeId, ProcessToken};

/// A dying process closes its streams before or after its listener, within a moment.
const AGAIN_MIN: Duration = Duration::from_millis(1);
/// The longest pause between two attempts, in heartbeats.
const AGAIN_BEATS_MAX: u32 = 5;
/// A hello is far smaller.
const HELLO_BYTES_MAX: usize = 4 << 10;

/// Asks for a stream.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Attend;

/// The first and only word of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The process that answers.
    pub(crate) process: ProcessToken,
}

/// `POST /raft/attend`.
pub(super) async fn attend(State(inner): State<Arc<Inner>>, body: Bytes) -> Answer {
    let asked = Asked::<Attend>::open(&inner, &body)?;
    let header = asked.member.peers.header(asked.from.from);
    let hello = wire::seal(Kind::Response, &header, &Hello { process: inner.process });
    let mut frame = (hello.len() as u32).to_le_bytes().to_vec();
    frame.extend_from_slice(&hello);
    // A node that is closed ends its streams properly, for the listener waits for them.
    let stop = inner.stop.clone().cancelled_owned();
    let frame = once(std::future::ready(Ok::<_, io::Error>(Bytes::from(frame))));
    let stream = frame.chain(pending()).take_until(stop);
    let kind = [(header::CONTENT_TYPE, "application/octet-stream")];
    Ok((kind, Body::from_stream(stream)).into_response())
}

/// Why there is no stream.
#[derive(Debug)]
enum Failed {
    /// Nobody listens at the address.
    Refused,
    /// Anything else; in words.
    Otherwise(String),
}

/// Holds a stream to the leader of this vote and says what its end looks like.
pub(super) async fn follow(member: &Member, vote: Vote) -> Infallible {
    let leader = vote.leader_id.voted_for;
    let pause_max = member.timing.heartbeat * AGAIN_BEATS_MAX;
    let mut greeted: Option<ProcessToken> = None;
    let mut pause = AGAIN_MIN;
    loop {
        match open(member, leader).await {
            Ok((process, stream)) => {
                if greeted.is_some_and(|before| before != process) {
                    suspect(member, vote, "another process answers in its place");
                    return std::future::pending().await;
                }
                greeted = Some(process);
                member.suspicions.attended(vote, process);
                let began = member.clock.now();
                let how = end(stream).await;
                tracing::debug!(leader, how, "the stream to the leader has ended");
                if member.clock.now() - began > pause_max {
                    pause = AGAIN_MIN;
                    continue;
                }
            }
            Err(Failed::Refused) if greeted.is_some() => {
                suspect(member, vote, "its connection ended and a new one is refused");
                // From now on only to see whether it is back.
                pause = pause_max;
            }
            Err(Failed::Refused) => tracing::debug!(leader, "the leader's address refuses"),
            Err(Failed::Otherwise(why)) => {
                tracing::debug!(leader, why, "no stream to the leader");
                member.suspicions.withdraw();
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(pause_max);
    }
}

fn suspect(member: &Member, vote: Vote, why: &str) {
    if member.suspicions.suspect(vote) {
        let (leader, term) = (vote.leader_id.voted_for, vote.leader_id.term);
        tracing::info!(leader, term, "the leader may be dead: {why}");
    }
}

/// Opens a stream, up to its hello.
async fn open(
    member: &Member,
    leader: NodeId,
) -> Result<(ProcessToken, reqwest::Response), Failed> {
    let address = member
        .address_of(leader)
        .ok_or_else(|| Failed::Otherwise("the membership does not name it".to_owned()))?;
    let body = wire::seal(Kind::Request, &member.peers.header(leader), &Attend);
    let request = member.peers.client(Lane::Attend).post(format!("http://{address}/raft/attend"));
    let greeted = async {
        let response = member.peers.send(request.body(body)).await;
        let mut response = response.map_err(|lost| match lost {
            Lost::Refused(_) => Failed::Refused,
            other => Failed::Otherwise(other.why().to_owned()),
        })?;
        if response.status() != StatusCode::OK {
            return Err(Failed::Otherwise(format!("status {}", response.status())));
        }
        let process = hello(member, leader, &mut response).await.map_err(Failed::Otherwise)?;
        Ok((process, response))
    };
    let within = member.timing.append;
    let late = |_| Failed::Otherwise(format!("no hello within {within:?}"));
    tokio::time::timeout(within, greeted).await.map_err(late)?
}

/// Reads and checks the hello.
async fn hello(
    member: &Member,
    leader: NodeId,
    response: &mut reqwest::Response,
) -> Result<ProcessToken, String> {
    let mut read = Vec::new();
    let frame = loop {
        if let Some((length, rest)) = read.split_first_chunk::<4>() {
            let length = u32::from_le_bytes(*length) as usize;
            if length > HELLO_BYTES_MAX {
                return Err(format!("a hello of {length} bytes"));
            }
            if let Some(frame) = rest.get(..length) {
                break frame;
            }
        }
        let piece = response.chunk().await.map_err(|error| error.to_string())?;
        read.extend_from_slice(&piece.ok_or("the stream ended before its hello")?);
    };
    let (header, payload) = wire::open(Kind::Response, frame).map_err(|error| error.to_string())?;
    if header.from != leader {
        return Err(format!("node {} answers", header.from));
    }
    member.peers.admit(&header).map_err(|refusal| refusal.to_string())?;
    let hello: Hello = wire::message(payload).map_err(|error| error.to_string())?;
    Ok(hello.process)
}

/// Reads a stream to its end; how it ended.
async fn end(mut stream: reqwest::Response) -> &'static str {
    loop {
        match stream.chunk().await {
            Ok(Some(_)) => {}
            Ok(None) => return "properly",
            Err(_) => return "broken",
        }
    }
}
