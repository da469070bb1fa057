//! Where a mail server is, and how it is talked to.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use lettre::transport::smtp::client::{Certificate, CertificateStore, TlsParameters, TlsVersion};
use tokio::net::TcpStream;

use crate::provider::encrypted::{self, Io};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Security {
    /// TLS from the first byte.
    Tls,
    /// TLS after a command; nothing is said before it but that.
    StartTls,
    /// None.
    Plain,
}

/// A mail server, for reading ([`Email::imap`](super::Email::imap)) or for sending
/// ([`Email::smtp`](super::Email::smtp)). Cheap to clone.
#[derive(Clone)]
pub struct Server {
    pub(super) host: String,
    port: u16,
    pub(super) security: Security,
    /// Plain text is spoken to other machines, too.
    insecure: bool,
    pub(super) login: Option<(String, Arc<str>)>,
    /// Certificates that are believed besides those of the public authorities, as DER.
    roots: Vec<Vec<u8>>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The password is a secret.
        let Self { host, port, security, .. } = self;
        write!(f, "Server({host}:{port}, {security:?})")
    }
}

impl Server {
    /// By TLS from the first byte: port 993 for IMAP, 465 for SMTP.
    pub fn tls(host: impl Into<String>, port: u16) -> Self {
        Self::new(host.into(), port, Security::Tls)
    }

    /// By TLS after `STARTTLS`, and not at all without: port 143 for IMAP, 587 for SMTP.
    pub fn starttls(host: impl Into<String>, port: u16) -> Self {
        Self::new(host.into(), port, Security::StartTls)
    }

    /// In plain text, on this machine. To any other it is refused, but for
    /// [`Server::insecure`].
    pub fn plain(host: impl Into<String>, port: u16) -> Self {
        Self::new(host.into(), port, Security::Plain)
    }

    fn new(host: String, port: u16, security: Security) -> Self {
        Self { host, port, security, insecure: false, login: None, roots: Vec::new() }
    }

    /// Who logs in.
    #[must_use]
    pub fn login(mut self, user: impl Into<String>, password: impl Into<Arc<str>>) -> Self {
        self.login = Some((user.into(), password.into()));
        self
    }

    /// Speaks plain text to another machine: whoever is on the way reads mail and password.
    #[must_use]
    pub fn insecure(mut self) -> Self {
        self.insecure = true;
        self
    }

    /// Believes certificates of this authority (DER), too.
    #[must_use]
    pub fn root_certificate(mut self, der: Vec<u8>) -> Self {
        self.roots.push(der);
        self
    }

    /// The addresses of its name; an error where it is not to be talked to in plain text.
    pub(super) async fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        let found = tokio::net::lookup_host((self.host.as_str(), self.port)).await?;
        let found: Vec<SocketAddr> = found.collect();
        let local = found.iter().all(|address| address.ip().is_loopback());
        if self.security == Security::Plain && !self.insecure && !local {
            let why = format!("{} is another machine; use TLS, or Server::insecure", self.host);
            return Err(io::Error::other(why));
        }
        Ok(found)
    }

    /// A connection; with [`Security::Tls`], encrypted.
    pub(super) async fn connect(&self) -> io::Result<Box<dyn Io>> {
        let stream = TcpStream::connect(self.addresses().await?.as_slice()).await?;
        stream.set_nodelay(true)?;
        match self.security {
            Security::Tls => self.encrypt(Box::new(stream)).await,
            Security::StartTls | Security::Plain => Ok(Box::new(stream)),
        }
    }

    /// The same connection, encrypted.
    pub(super) async fn encrypt(&self, stream: Box<dyn Io>) -> io::Result<Box<dyn Io>> {
        encrypted::over(stream, &self.host, &self.roots).await
    }

    /// The same for the client that sends.
    pub(super) fn parameters(&self) -> Result<TlsParameters, lettre::transport::smtp::Error> {
        let mut parameters = TlsParameters::builder(self.host.clone())
            .certificate_store(CertificateStore::WebpkiRoots)
            .set_min_tls_version(TlsVersion::Tlsv12);
        for root in &self.roots {
            parameters = parameters.add_root_certificate(Certificate::from_der(root.clone())?);
        }
        parameters.build_rustls()
    }
}
