//! Every provider that exists, against the tests that any provider has to pass.

use botmesh::provider::discord::Discord;
use botmesh::provider::email::Email;
use botmesh::provider::meta::Meta;
use botmesh::provider::telegram::Telegram;
use botmesh::provider::webchat::Webchat;
use botmesh::provider::webhook::{Mapping, WebhookProvider};
use botmesh::provider::{Secret, WebhookRequest, conformance};
use botmesh::testing::ScriptedProvider;
use serde_json::{Value, json};

use super::bot_api::{BotApi, TOKEN, message};
use super::discord_api::{self, DiscordApi};
use super::mail::{Dovecot, have};

fn request(header: Option<(&str, &str)>, body: &Value) -> WebhookRequest {
    WebhookRequest {
        method: "POST".into(),
        path: String::new(),
        query: String::new(),
        headers: header.map(|(name, value)| (name.into(), value.into())).into_iter().collect(),
        body: body.to_string().into(),
    }
}

fn signed(secret: &Secret, header: &str, body: &Value) -> WebhookRequest {
    let signature = secret.sign(body.to_string().as_bytes());
    request(Some((header, &signature)), body)
}

#[tokio::test]
async fn d4_every_provider_conforms() {
    let posted = json!({ "id": "m1", "chat": "c", "participant": "p", "text": "hi" });
    let plain = [(request(None, &posted), &["m1"][..])];
    conformance::provider(&WebhookProvider::new("hook"), &plain).await;
    conformance::provider(&Webchat, &plain).await;
    let secret = Secret::new("s");
    let provider = WebhookProvider::new("hook").signed(secret.clone(), "x-signature");
    let sample = signed(&secret, "x-signature", &posted);
    conformance::provider(&provider, &[(sample, &["m1"])]).await;
    let mapping = Mapping::new("id", "chat", "text").unwrap().each("all").unwrap();
    let provider = WebhookProvider::new("hook").mapping(mapping);
    let many = json!({ "all": [posted, { "id": 2, "chat": "c", "text": "ho" }] });
    conformance::provider(&provider, &[(request(None, &many), &["m1", "2"])]).await;
    conformance::provider(&ScriptedProvider::new("x"), &[]).await;
    conformance::provider(&ScriptedProvider::exclusive("x"), &[]).await;

    let api = BotApi::start().await;
    conformance::provider(&Telegram::new("tg", TOKEN).base_url(&api.url), &[]).await;
    let telegram =
        Telegram::new("tg", TOKEN).base_url(&api.url).webhook("https://b", Secret::new("t"));
    let header = Some(("x-telegram-bot-api-secret-token", "t"));
    let said = request(header, &json!({ "update_id": 7, "message": message(1, "hi") }));
    let edited = request(header, &json!({ "update_id": 8, "edited_message": message(1, "hi") }));
    conformance::provider(&telegram, &[(said, &["7"]), (edited, &[])]).await;

    let api = DiscordApi::start().await;
    conformance::provider(&Discord::new("dc", discord_api::TOKEN).base_url(&api.url), &[]).await;

    let email = Email::new("mail", "bot@shop.example").unwrap();
    conformance::provider(&email, &[]).await;
    if have(&["dovecot"]) {
        let dovecot = Dovecot::start(false).await;
        conformance::provider(&email.imap(dovecot.server(), "INBOX"), &[]).await;
    }

    let whatsapp = Meta::whatsapp("wa", secret.clone(), Secret::new("v")).account("1", "t");
    let text =
        |id: &str| json!({ "id": id, "from": "49", "type": "text", "text": { "body": "hi" } });
    let value =
        json!({ "metadata": { "phone_number_id": "1" }, "messages": [text("a"), text("b")] });
    let change = json!({ "field": "messages", "value": value });
    let body = json!({
        "object": "whatsapp_business_account", "entry": [{ "id": "w", "changes": [change] }],
    });
    let sample = signed(&secret, "x-hub-signature-256", &body);
    conformance::provider(&whatsapp, &[(sample, &["a", "b"])]).await;
    let page = Meta::messenger("fb", secret.clone(), Secret::new("v")).account("p", "t");
    let event = json!({ "sender": { "id": "u" }, "message": { "mid": "m", "text": "hi" } });
    let body = json!({ "object": "page", "entry": [{ "id": "p", "messaging": [event] }] });
    let sample = signed(&secret, "x-hub-signature-256", &body);
    conformance::provider(&page, &[(sample, &["m"])]).await;
}
