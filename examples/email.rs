//! A bot by email.
//!
//! Without arguments: mail is handed in at two replicas in one process, and goes out to an SMTP server
//! beside them; the same mail at both is one turn, and what a program wrote is not answered.
//! `cargo run --example email`
//!
//! With an account, reading its inbox by IMAP: `email ADDRESS IMAP_HOST SMTP_HOST USER PASSWORD`
//! (ports 993 and 587).

use std::time::Duration;

use botmesh::bot::{Bot, BotBuilder, Coordination, Result, Route};
use botmesh::coordinator::CoordinatorOptions;
use botmesh::provider::email::{Email, Server};
use botmesh::store::GroupStore;
use botmesh::testing::MemoryHub;

#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/smtp.rs"]
mod smtp;

fn bot(email: Email) -> BotBuilder {
    Bot::builder().provider(email).on(Route::Any, async |ctx| {
        let subject = ctx.message().extra["subject"].as_str().unwrap_or_default();
        let said = format!("You wrote {:?} about {subject:?}.", ctx.text());
        Ok(ctx.reply(said).await?)
    })
}

async fn replica(email: Email, hub: &MemoryHub) -> Result<Bot> {
    let store = GroupStore::new(hub.as_group(), MemoryHub::default_prefix());
    let coordination = Coordination::new(store.coordinator(CoordinatorOptions::default()));
    let bot = bot(email).store(store).coordination(coordination).build().await?;
    bot.start().await?;
    bot.ready().await;
    Ok(bot)
}

/// Two replicas on a hub that mail is handed in at.
async fn show() -> Result {
    let server = smtp::Smtp::start().await;
    let hub = MemoryHub::new();
    let email = || Email::new("email", "shop@example.org").map(|email| email.smtp(server.server()));
    let (one, two) = (email()?, email()?);
    let bots = [replica(one.clone(), &hub).await?, replica(two.clone(), &hub).await?];
    let question = smtp::mail("Ann <ann@example.net>", "1@example.net", "Tea", "How much is it?");
    println!("to the first replica: {:?}", one.ingest(question.as_bytes()).await?);
    println!("to the second, again: {:?}", two.ingest(question.as_bytes()).await?);
    let absence = smtp::mail("bob@example.net", "2@example.net", "Away", "I am away.");
    let absence = format!("Auto-Submitted: auto-replied\r\n{absence}");
    println!("an absence note: {:?}", two.ingest(absence.as_bytes()).await?);
    while server.taken().is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for bot in bots {
        bot.stop().await?;
    }
    for reply in server.taken() {
        let field = |name| smtp::field(&reply.raw, name).unwrap_or_default();
        println!("to {}, in reply to {}", reply.to, field("In-Reply-To"));
        println!("{}: {}", field("Subject"), smtp::text(&reply.raw));
    }
    Ok(())
}

/// One process with an account of its own.
async fn account(address: &str, imap: &str, smtp: &str, user: &str, password: &str) -> Result {
    let email = Email::new("email", address)?
        .imap(Server::tls(imap, 993).login(user, password), "INBOX")
        .smtp(Server::starttls(smtp, 587).login(user, password));
    let bot = bot(email).build().await?;
    let ended = async {
        // Without the signal the process ends by it.
        let _ = tokio::signal::ctrl_c().await;
    };
    bot.run_until(ended).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => show().await,
        [address, imap, smtp, user, password] => account(address, imap, smtp, user, password).await,
        _ => Err("email [ADDRESS IMAP_HOST SMTP_HOST USER PASSWORD]".into()),
    }
}
