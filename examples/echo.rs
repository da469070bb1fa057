//! The smallest bot: one process, in memory, no port. It answers three lines and ends.
//!
//! `cargo run --example echo --features test-util`

use botmesh::bot::{Bot, Result, Route};
use botmesh::testing::ScriptedProvider;

#[tokio::main]
async fn main() -> Result {
    let chat = ScriptedProvider::new("terminal");
    let bot = Bot::builder()
        .provider(chat.clone())
        .command("shout", async |ctx| Ok(ctx.reply(ctx.args().to_uppercase()).await?))
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
        .build()
        .await?;
    bot.start().await?;

    let ann = chat.user("ann");
    for line in ["hello", "/shout is anybody there", "bye"] {
        println!("ann> {line}");
        println!("bot> {}", ann.says(line).await.hears_any().await.text);
    }
    bot.stop().await?;
    Ok(())
}
