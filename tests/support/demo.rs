//! The demo bot's door: its webhook and the list of its replies (SPEC N5).

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};

use super::api::{Api, Outcome, Request};

/// One text of the bot, as the list of replies shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Its id.
    pub id: String,
    /// The message that caused it.
    pub in_reply_to: String,
    /// The text.
    pub text: String,
    /// Fence of the turn it was said in, where set.
    pub fence: Option<u64>,
    /// Its number under that fence.
    pub turn_seq: u64,
}

/// The public listeners of the nodes.
#[derive(Clone)]
pub struct Demo {
    /// The client.
    pub api: Api,
}

impl Demo {
    /// Through these public listeners.
    pub fn new(public: Api) -> Self {
        Self { api: public }
    }

    /// Delivers a message as a provider does: to `node` first, again elsewhere while it is not
    /// answered 200. Tells whether the bot called it a duplicate.
    pub async fn post(&self, node: usize, id: &str, chat: &str, text: &str) -> bool {
        let body = json!({ "id": id, "chat": chat, "text": text });
        let request = Request::new(Method::POST, "/webhooks/demo").body(body).key(id);
        let answer = self.api.call(node, &request).await.answer();
        assert_eq!(answer.status, 200, "webhook: {}", answer.body);
        assert_eq!(answer.body["accepted"], true, "webhook: {}", answer.body);
        answer.body["duplicate"].as_bool().expect("duplicate is a boolean")
    }

    /// One delivery with no second attempt; `None` = the outcome is unknown or it was refused.
    pub async fn post_once(&self, node: usize, id: &str, chat: &str, text: &str) -> Option<bool> {
        let body = json!({ "id": id, "chat": chat, "text": text });
        let request =
            Request::new(Method::POST, "/webhooks/demo").body(body).once(Duration::from_secs(5));
        match self.api.call(node, &request).await {
            Outcome::Answered(answer) if answer.status == 200 => answer.body["duplicate"].as_bool(),
            _ => None,
        }
    }

    /// The replies of a chat, as `node` lists them.
    pub async fn replies(&self, node: usize, chat: &str) -> Vec<Reply> {
        let request = Request::new(Method::GET, format!("/webhooks/demo/replies?chat={chat}"));
        let answer = self.api.call(node, &request).await.answer();
        assert_eq!(answer.status, 200, "replies: {}", answer.body);
        let list = answer.body.as_array().expect("the replies are an array");
        let text = |reply: &Value, name: &str| {
            reply[name].as_str().unwrap_or_else(|| panic!("{name} in {reply}")).to_owned()
        };
        list.iter()
            .map(|reply| Reply {
                id: text(reply, "id"),
                in_reply_to: text(reply, "in_reply_to"),
                text: text(reply, "text"),
                fence: reply["fence"].as_u64(),
                turn_seq: reply["turn_seq"].as_u64().expect("turn_seq is a number"),
            })
            .collect()
    }

    /// Waits for the first text that answers a message, as `node` or any other lists it.
    pub async fn answer_to(&self, node: usize, id: &str, chat: &str, within: Duration) -> Reply {
        let until = Instant::now() + within;
        loop {
            let replies = self.replies(node, chat).await;
            if let Some(reply) = replies.iter().find(|reply| reply.in_reply_to == id) {
                return reply.clone();
            }
            assert!(
                Instant::now() < until,
                "{id} in {chat} has no answer within {within:?}; the chat so far: {replies:?}"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
