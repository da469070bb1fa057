//! Users who talk to the demo bot, and what must be true of what they are told.
//!
//! Every message is answered by exactly one text. A user says the next thing only when the bot has
//! taken the one before (200), so the texts come in the order of the messages, whatever node each
//! went through; and they are numbered by (fence, number under it), which grows.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rand::Rng;
use rand::rngs::StdRng;

use super::demo::{Demo, Reply};

/// What is wrong with what a user was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A message that was taken has no answer.
    Lost {
        /// The message.
        id: String,
    },
    /// A message is answered twice, or a text comes twice.
    Doubled {
        /// The message.
        id: String,
    },
    /// An answer to a message of nobody's.
    Unasked {
        /// The message it names.
        id: String,
    },
    /// Another text than the conversation asks for.
    WrongText {
        /// The message.
        id: String,
        /// What was said.
        text: String,
    },
    /// An answer stands behind one to a later message.
    OutOfOrder {
        /// The message.
        id: String,
        /// The later one.
        behind: String,
    },
    /// The fence went back, or the number under it did not grow.
    NumberWentBack {
        /// The message.
        id: String,
        /// The (fence, number) before.
        before: (u64, u64),
        /// Its own.
        after: (u64, u64),
    },
}

/// A message that was taken, and the text that answers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// Its id.
    pub id: String,
    /// What the bot has to say to it.
    pub answer: String,
}

/// Everything that is wrong with these answers to these messages.
pub fn faults(said: &[Said], replies: &[Reply]) -> Vec<Fault> {
    let mut faults = Vec::new();
    let places: BTreeMap<&str, usize> =
        said.iter().enumerate().map(|(at, said)| (&*said.id, at)).collect();
    let (mut answered, mut texts) = (BTreeSet::new(), BTreeSet::new());
    let (mut last, mut number) = (0, None);
    for reply in replies {
        let id = reply.in_reply_to.clone();
        let Some(&place) = places.get(&*id) else {
            faults.push(Fault::Unasked { id });
            continue;
        };
        if !answered.insert(place) || !texts.insert(&reply.id) {
            faults.push(Fault::Doubled { id: id.clone() });
        }
        if said[place].answer != reply.text {
            faults.push(Fault::WrongText { id: id.clone(), text: reply.text.clone() });
        }
        if place < last {
            let behind = said[last].id.clone();
            faults.push(Fault::OutOfOrder { id: id.clone(), behind });
        }
        last = last.max(place);
        let after = (reply.fence.unwrap_or(0), reply.turn_seq);
        if let Some(before) = number
            && before >= after
        {
            faults.push(Fault::NumberWentBack { id, before, after });
        }
        number = Some(after);
    }
    let missing = said.iter().enumerate().filter(|(place, _)| !answered.contains(place));
    faults.extend(missing.map(|(_, said)| Fault::Lost { id: said.id.clone() }));
    faults
}

/// One chat and its user.
pub struct Chat {
    demo: Demo,
    name: String,
    /// How long the user waits for an answer before it is called lost.
    patience: Duration,
    said: Vec<Said>,
    /// How long each answer that was waited for took.
    pub waits: Vec<Duration>,
}

impl Chat {
    /// A user in a chat of their own.
    pub fn new(demo: &Demo, name: String, patience: Duration) -> Self {
        Self { demo: demo.clone(), name, patience, said: Vec::new(), waits: Vec::new() }
    }

    /// How many messages were taken.
    pub fn said(&self) -> usize {
        self.said.len()
    }

    /// Says something at a node, and at the others while it is not taken.
    pub async fn say(&mut self, node: usize, text: &str, answer: impl Into<String>) {
        let id = self.next_id();
        self.demo.post(node, &id, &self.name, text).await;
        self.said.push(Said { id, answer: answer.into() });
    }

    /// Says something twice at once, at two nodes, under one id.
    pub async fn say_twice(&mut self, node: usize, text: &str, answer: impl Into<String>) {
        let id = self.next_id();
        let one = self.demo.post(node, &id, &self.name, text);
        let other = self.demo.post(node + 1, &id, &self.name, text);
        tokio::join!(one, other);
        self.said.push(Said { id, answer: answer.into() });
    }

    fn next_id(&self) -> String {
        format!("{}-{}", self.name, self.said.len())
    }

    /// Waits until the last message is answered.
    pub async fn is_answered(&mut self) {
        let Some(said) = self.said.last() else { return };
        let (began, mut pause) = (Instant::now(), Duration::from_millis(10));
        loop {
            let replies = self.demo.replies(self.said.len(), &self.name).await;
            if replies.iter().any(|reply| reply.in_reply_to == said.id) {
                return self.waits.push(began.elapsed());
            }
            let waited = began.elapsed();
            assert!(waited < self.patience, "{said:?} has no answer after {waited:?}: {replies:?}");
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(Duration::from_millis(200));
        }
    }

    /// An order, question by question, each answer through another node.
    pub async fn order(&mut self, random: &mut StdRng) {
        let (item, quantity) = (format!("tea {}", self.said.len()), random.random_range(1..9));
        let summary = format!("Ordered: {quantity} × {item}, to 7 Elm.");
        let steps = [
            ("order", "What would you like?"),
            (&item, "How many?"),
            ("many", "How many?"),
            (&quantity.to_string(), "Where to?"),
            ("7 Elm", "Confirm? (yes/no)"),
            ("yes", &summary),
        ];
        for (text, answer) in steps {
            if text == "many" && random.random_bool(0.7) {
                continue;
            }
            self.say(random.random_range(0..99), text, answer).await;
            self.is_answered().await;
        }
    }

    /// A few messages one upon the other.
    pub async fn chatter(&mut self, random: &mut StdRng) {
        for _ in 0..random.random_range(2..7) {
            let text = format!("word {}", self.said.len());
            let (node, answer) = (random.random_range(0..99), format!("echo: {text}"));
            if random.random_bool(0.15) {
                self.say_twice(node, &text, answer).await;
            } else {
                self.say(node, &text, answer).await;
            }
        }
        self.is_answered().await;
    }

    /// What is wrong with all that was said in it, once the last message is answered.
    pub async fn faults(&mut self) -> Vec<String> {
        self.is_answered().await;
        let replies = self.demo.replies(self.said.len(), &self.name).await;
        let found = faults(&self.said, &replies);
        let told = |fault: &Fault| format!("{}: {fault:?} in {replies:#?}", self.name);
        found.iter().map(told).collect()
    }
}
