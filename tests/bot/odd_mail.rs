//! Mail as it comes: charsets, broken encodings, no author, two authors, bounces.

use std::sync::Arc;

use botmesh::bot::{BotBuilder, Route};
use botmesh::provider::email::Ingested;
use botmesh::testing::MemoryHub;
use parking_lot::Mutex;
use serde_json::Value;

use super::email::{email, hand_in, start};
use super::mail::until;
use super::smtp::mail;

const ANN: &str = "ann@a.example";

/// What a mail is taken for.
async fn taken_for(raw: &[u8]) -> Result<Value, String> {
    let seen: Arc<Mutex<Option<Value>>> = Arc::default();
    let noted = seen.clone();
    let provider = email();
    let make = |bot: BotBuilder| {
        bot.on(Route::Any, async move |ctx| {
            *noted.lock() = Some(serde_json::to_value(ctx.message()).unwrap());
            Ok(())
        })
    };
    let _a = start(&MemoryHub::new(), provider.clone(), make).await;
    let taken = hand_in(&provider, raw).await;
    match taken {
        Ok(Ingested::Taken) => {
            until("it has its turn", || seen.lock().is_some()).await;
            Ok(seen.lock().take().unwrap())
        }
        Ok(other) => Err(format!("{other:?}")),
        Err(error) => Err(error.to_string()),
    }
}

#[tokio::test]
async fn d4_odd_mail_is_read_as_well_as_it_can_be() {
    let text =
        async |raw: &[u8]| taken_for(raw).await.unwrap()["text"].as_str().unwrap().to_owned();
    let head = "From: ann@a.example\r\nMessage-ID: <m@a.example>\r\nMIME-Version: 1.0\r\n";
    let typed = |kind: &str, encoding: &str, body: &[u8]| {
        let head =
            format!("{head}Content-Type: {kind}\r\nContent-Transfer-Encoding: {encoding}\r\n\r\n");
        [head.as_bytes(), body].concat()
    };
    // Charsets.
    let japanese = b"\x1b$B$3$s$K$A$O\x1b(B\r\n";
    assert_eq!(
        text(&typed("text/plain; charset=iso-2022-jp", "7bit", japanese)).await,
        "こんにちは"
    );
    let seven = b"Gr+APwA3w-e\r\n";
    assert_eq!(text(&typed("text/plain; charset=utf-7", "7bit", seven)).await, "Grüße");
    let cyrillic = b"\xf0\xd2\xc9\xd7\xc5\xd4";
    assert_eq!(text(&typed("text/plain; charset=koi8-r", "8bit", cyrillic)).await, "Привет");
    // Encodings that are broken off or none.
    let broken = text(&typed("text/plain; charset=utf-8", "base64", b"aGVsbG8gd29ybGQ")).await;
    assert!(broken.starts_with("hello wor"), "{broken:?}");
    let garbage = text(&typed("text/plain", "quoted-printable", b"a=ZZb =\r\nc=3D=")).await;
    assert!(garbage.starts_with('a') && garbage.contains("c="), "{garbage:?}");
    // HTML alone.
    let html = text(&typed("text/html", "7bit", b"<p>Hello&nbsp;<b>Bob</b> &amp; all</p>")).await;
    assert!(html.contains("Hello") && html.contains("Bob") && html.contains("& all"), "{html:?}");
    assert!(!html.contains('<'), "{html:?}");
    // One boundary begins like the other.
    let similar = "--a\r\nContent-Type: multipart/alternative; boundary=\"ab\"\r\n\r\n\
        --ab\r\nContent-Type: text/plain\r\n\r\nplain\r\n\
        --ab\r\nContent-Type: text/html\r\n\r\n<p>html</p>\r\n--ab--\r\n\
        --a\r\nContent-Type: application/pdf; name=\"order.pdf\"\r\n\
        Content-Disposition: attachment; filename=\"order.pdf\"\r\n\
        Content-Transfer-Encoding: base64\r\n\r\naGVsbG8=\r\n--a--\r\n";
    let similar = typed("multipart/mixed; boundary=\"a\"", "7bit", similar.as_bytes());
    let similar = taken_for(&similar).await.unwrap();
    assert_eq!(similar["text"], "plain");
    assert_eq!(similar["extra"]["attachments"][0]["name"], "order.pdf");
    assert_eq!(similar["extra"]["attachments"][0]["bytes"], 5);
    // A boundary that never comes, and one that is never closed.
    let never = typed("multipart/mixed; boundary=\"x\"", "7bit", b"no part at all");
    assert!(taken_for(&never).await.is_ok());
    let open = b"--x\r\nContent-Type: text/plain\r\n\r\nstill read";
    assert_eq!(text(&typed("multipart/mixed; boundary=\"x\"", "7bit", open)).await, "still read");
    // Words of RFC 2047, one of them cut off.
    let words =
        format!("{head}Subject: =?iso-8859-1?Q?caf=E9?= =?utf-8?b?4oKs?= =?utf-8?q?x\r\n\r\nhi");
    let words = taken_for(words.as_bytes()).await.unwrap();
    assert!(words["extra"]["subject"].as_str().unwrap().starts_with("café€"), "{words}");
    // A subject of a megabyte.
    let long = format!("{head}Subject: {}\r\n\r\nhi", "x".repeat(1 << 20));
    let long = taken_for(long.as_bytes()).await.unwrap();
    assert_eq!(long["text"], "hi");
    assert!(long["extra"]["subject"].as_str().unwrap().len() <= 200);
    // A text of a megabyte is cut, and says so.
    let long = format!("{head}\r\n{}", "é".repeat(1 << 20));
    let long = taken_for(long.as_bytes()).await.unwrap();
    assert!(long["text"].as_str().unwrap().len() <= 128 * 1024);
    assert_eq!(long["extra"]["cut"], true);
}

#[tokio::test]
async fn d4_mail_without_an_author_or_with_two_is_refused_and_bounces_make_no_turn() {
    // The text begins before the empty line, or there is none.
    let early =
        b"From: ann@a.example\r\nMessage-ID: <m@a.example>\r\nthis is no field\r\n\r\nhi\r\n";
    let early = taken_for(early).await.unwrap();
    assert_eq!(early["chat"], "mail:ann@a.example");
    let none = b"From: ann@a.example\r\nMessage-ID: <m@a.example>\r\nSubject: all head\r\n";
    let none = taken_for(none).await.unwrap();
    assert_eq!(none["extra"]["subject"], "all head");
    // Without a Message-ID.
    let unnamed = taken_for(b"From: ann@a.example\r\n\r\nhi\r\n").await.unwrap();
    assert_eq!(unnamed["text"], "hi");
    assert!(unnamed["id"].as_str().unwrap().ends_with(".1"));
    for (raw, wanted) in [
        ("From: a@a.example\r\nFrom: b@b.example\r\n\r\nhi", "two From"),
        ("From: a@a.example, b@b.example\r\n\r\nhi", "several"),
        ("Subject: x\r\n\r\nhi", "no From"),
        ("From: undisclosed-recipients:;\r\n\r\nhi", "nobody"),
        ("From: \"Ann\" <not an address>\r\n\r\nhi", "address"),
        ("\r\n\r\n", "From"),
        ("", "no header"),
    ] {
        let found = taken_for(raw.as_bytes()).await.unwrap_err();
        assert!(found.contains(wanted), "{raw:?}: {found}");
    }
    // Several authors, and who sent it.
    let sent = "From: a@a.example, b@b.example\r\nSender: B@b.example\r\n\r\nhi";
    assert_eq!(taken_for(sent.as_bytes()).await.unwrap()["chat"], "mail:b@b.example");
    let report = "From: Mail Delivery System <MAILER-DAEMON@mx.example>\r\nSubject: failed\r\n\
        Content-Type: multipart/report; report-type=delivery-status; boundary=\"r\"\r\n\r\n\
        --r\r\n\r\nIt could not be delivered.\r\n\
        --r\r\nContent-Type: message/delivery-status\r\n\r\nFinal-Recipient: rfc822; x@y\r\n\r\n\
        --r--\r\n";
    for bounce in [
        report.to_owned(),
        "From: postmaster@mx.example\r\n\r\nfailed".to_owned(),
        format!("Return-Path: <>\r\n{}", mail(ANN, "b@a.example", "s", "failed")),
        format!("List-Id: <l.example>\r\n{}", mail(ANN, "b@a.example", "s", "news")),
    ] {
        let found = taken_for(bounce.as_bytes()).await.unwrap_err();
        assert!(found.starts_with("Silent"), "{bounce}: {found}");
    }
}
