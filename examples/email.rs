//! A bot by email.
//!
//! Without arguments: mail is handed in at two replicas in one process, and goes out to an SMTP server
//! beside them; the same mail at both is one turn, and what a program wrote is not answered.
//! `cargo run --example email`
//!
//! With an account, reading its inbox by IMAP: `email ADDRESS IMAP_HOST SMTP_HOST USER PASSWORD`
//! (ports 993 and 587).
//!
//! As one of several processes, each with a node of the group, with mail servers on this machine:
//! `email NAME DIR CLUSTER_ADDRESS SECRET IMAP_PORT SMTP_PORT [JOIN_ADDRESS]`

use std::time::Duration;

use botmesh::bot::{Bot, BotBuilder, Result, Route};
use botmesh::provider::email::{Email, Server};
use botmesh::store::GroupStore;
use botmesh::testing::MemoryHub;

#[allow(unreachable_pub, reason = "shared with other examples")]
#[path = "../tests/support/member.rs"]
mod member;
#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/smtp.rs"]
mod smtp;

use member::Member;

fn bot(email: Email) -> BotBuilder {
    Bot::builder().provider(email).on(Route::Any, async |ctx| {
        let subject = ctx.message().extra["subject"].as_str().unwrap_or_default();
        let said = format!("You wrote {:?} about {subject:?}.", ctx.text());
        Ok(ctx.reply(said).await?)
    })
}

async fn replica(email: Email, hub: &MemoryHub) -> Result<Bot> {
    let store = GroupStore::new(hub.as_group(), MemoryHub::default_prefix());
    let bot = member::replica(bot(email), store).await?;
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

/// One process of several. What it says names the fence of its turn: one mail, one turn, one fence.
async fn member(member: &Member<'_>, imap: &str, smtp: &str) -> Result {
    let local =
        |port: &str| Ok::<_, std::num::ParseIntError>(Server::plain("127.0.0.1", port.parse()?));
    let email = Email::new("email", "bot@shop.example")?
        .imap(local(imap)?.login("shop", "secret"), "INBOX")
        .from_the_beginning()
        .smtp(local(smtp)?)
        .probe_every(Duration::from_secs(2))
        .turns_max(1_000, Duration::from_secs(1));
    let bot = Bot::builder().provider(email).on(Route::Any, async |ctx| {
        let said = format!("echo: {} under {}", ctx.text(), ctx.fence());
        Ok(ctx.reply(said).await?)
    });
    member.run(bot).await
}

#[tokio::main]
async fn main() -> Result {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let texts: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match texts[..] {
        [] => show().await,
        [address, imap, smtp, user, password] => account(address, imap, smtp, user, password).await,
        [name, dir, address, secret, imap, smtp, ..] => {
            let join = &arguments[6..];
            member(&Member { name, dir, address, secret, join }, imap, smtp).await
        }
        _ => Err("email [ADDRESS IMAP_HOST SMTP_HOST USER PASSWORD]".into()),
    }
}
