//! Bots on a hub: what a bot author relies on, by SPEC row. No process of ours, no disk; the machine
//! under them is the one the Raft group runs. Those by email read from a real server.

#![allow(clippy::unwrap_used, unreachable_pub, reason = "a test panics on what it did not expect")]

mod bot {
    #[path = "../support/bot_api.rs"]
    pub mod bot_api;
    #[path = "../support/discord_api.rs"]
    pub mod discord_api;
    #[path = "../support/discord_rest.rs"]
    mod discord_rest;
    #[path = "../support/graph_api.rs"]
    pub mod graph_api;
    #[path = "../support/mail.rs"]
    pub mod mail;
    #[path = "../support/smtp.rs"]
    pub mod smtp;
    pub mod support;
    #[path = "../support/whatsapp_api.rs"]
    pub mod whatsapp_api;
    #[path = "../support/whatsapp_people.rs"]
    pub mod whatsapp_people;
    #[path = "../support/whatsapp_wire.rs"]
    pub mod whatsapp_wire;

    mod conform;
    mod conversations;
    mod dialogue;
    mod discord;
    mod discord_gateway;
    mod discord_speaks;
    mod durability;
    mod email;
    mod events;
    mod handover;
    mod jobs;
    mod kept;
    mod life;
    mod local_fence;
    mod meta;
    mod meta_client;
    mod odd_mail;
    mod order_flow;
    mod rekey;
    mod sticky;
    mod telegram;
    mod transports;
    mod webhook;
    mod whatsapp_web;
    mod whatsapp_web_journal;
    mod whatsapp_web_storage;
}
