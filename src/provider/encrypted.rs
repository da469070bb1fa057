//! Connections that are no HTTP requests, encrypted: by rustls and ring, like all that leaves here.

use std::fmt;
use std::io;
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};

/// A connection, whatever it is made of.
pub(super) trait Io: AsyncRead + AsyncWrite + Unpin + Send + fmt::Debug {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send + fmt::Debug> Io for T {}

/// The same connection, encrypted; `roots` are authorities (DER) believed besides the public ones.
pub(super) async fn over(
    stream: Box<dyn Io>,
    host: &str,
    roots: &[Vec<u8>],
) -> io::Result<Box<dyn Io>> {
    let mut believed = RootCertStore::empty();
    believed.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    for root in roots {
        believed.add(CertificateDer::from(root.clone())).map_err(io::Error::other)?;
    }
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(ring)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(believed)
        .with_no_client_auth();
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    Ok(Box::new(connector.connect(name, stream).await?))
}
