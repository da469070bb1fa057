//! Linking the bot to an account: what a person is shown.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use qrcode::QrCode;
use qrcode::render::unicode::Dense1x2;

/// A step of linking the bot to an account ([`WhatsAppWeb::on_pairing`](super::WhatsAppWeb::on_pairing)).
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pairing {
    /// To be scanned by the account's phone: *Linked devices → Link a device*. Another follows.
    Qr {
        /// What the QR code says. Whoever knows it could pose as the phone: show it, log it nowhere.
        code: String,
        /// For how long.
        valid: Duration,
    },
    /// To be typed in on the account's phone: *Link with phone number instead*.
    Code {
        /// The code.
        code: String,
        /// For how long.
        valid: Duration,
    },
    /// It is linked, to this account.
    Linked {
        /// Its address.
        account: String,
    },
    /// It did not work; it is tried again, or another code follows.
    Failed {
        /// Why.
        why: String,
    },
}

impl fmt::Debug for Pairing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qr { valid, .. } => {
                f.debug_struct("Qr").field("valid", valid).finish_non_exhaustive()
            }
            Self::Code { valid, .. } => {
                f.debug_struct("Code").field("valid", valid).finish_non_exhaustive()
            }
            Self::Linked { account } => f.debug_struct("Linked").field("account", account).finish(),
            Self::Failed { why } => f.debug_struct("Failed").field("why", why).finish(),
        }
    }
}

/// Who is told.
pub(super) type OnPairing = Arc<dyn Fn(&Pairing) + Send + Sync>;

/// A QR code of half blocks, for a terminal of whatever colours.
pub fn qr(code: &str) -> Option<String> {
    let code = QrCode::new(code).ok()?;
    let (dark, light) = (Dense1x2::Light, Dense1x2::Dark);
    Some(code.render::<Dense1x2>().dark_color(dark).light_color(light).build())
}

/// Shows it on the terminal.
pub(super) fn on_terminal(step: &Pairing) {
    match step {
        Pairing::Qr { code, valid } => {
            let drawn = qr(code).unwrap_or_else(|| code.clone());
            let valid = valid.as_secs();
            eprintln!("Scan in WhatsApp > Linked devices, within {valid} s:\n\n{drawn}");
        }
        Pairing::Code { code, valid } => {
            let valid = valid.as_secs();
            eprintln!("WhatsApp > Linked devices > Link with phone number: {code}  ({valid} s)");
        }
        Pairing::Linked { account } => eprintln!("Linked to {account}."),
        Pairing::Failed { why } => eprintln!("Not linked: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d4_a_code_is_drawn_and_not_told() {
        let drawn = qr("2@ref,noise,identity,secret,1").unwrap();
        assert!(drawn.lines().count() > 10 && drawn.contains('█'), "{drawn}");
        let code = Pairing::Qr { code: "secret".to_owned(), valid: Duration::from_secs(20) };
        assert!(!format!("{code:?}").contains("secret"));
    }
}
