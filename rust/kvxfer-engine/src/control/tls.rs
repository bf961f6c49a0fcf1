//! TLS 1.3 on a control connection, with certificates on both sides. Bytes in and out; the socket is the caller's.

use crate::config::{StartError, TlsConfig};
use kvxfer_proto::wire::{Decoder, looks_like_tls};
use kvxfer_proto::{Reason, ReasonKind};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::{Resumption, verify_server_name};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, Connection, DigitallySignedStruct,
    DistinguishedName, Error, RootCertStore, ServerConfig, ServerConnection, SignatureScheme,
};
use std::io::{ErrorKind, Read, Write};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

/// Only agents speak this, so that no other service's connection can be passed off as one of ours.
const ALPN: &[u8] = b"kvxfer/1";
/// What the handshake's proofs are bound to, so that they hold for this TLS connection only.
const BINDING: &[u8] = b"EXPORTER-kvxfer-1";
/// Sealed bytes that may wait for the socket.
const SEALED: usize = 256 << 10;

/// What an agent's connections have in common.
#[derive(Debug)]
pub(crate) struct TlsSetup {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    /// What every peer's certificate must carry; the host that was dialled if there is none.
    name: Option<ServerName<'static>>,
}

fn bad(field: &str, path: &Path, why: impl std::fmt::Display) -> StartError {
    StartError::Auth(format!("tls: {field}={}: {why}", path.display()))
}

fn certificates(field: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, StartError> {
    let certs: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|e| bad(field, path, format!("cannot be read as PEM certificates: {}", pem_error(&e))))?;
    if certs.is_empty() {
        return Err(bad(field, path, "there is no certificate in it"));
    }
    Ok(certs)
}

fn pem_error(e: &rustls::pki_types::pem::Error) -> String {
    match e {
        rustls::pki_types::pem::Error::Io(e) => e.to_string(),
        rustls::pki_types::pem::Error::NoItemsFound => "there is none in it".to_owned(),
        other => format!("{other}"),
    }
}

impl TlsSetup {
    /// Reads and checks the files.
    pub(crate) fn load(files: &TlsConfig) -> Result<Self, StartError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let chain = certificates("cert", &files.cert)?;
        let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|e| {
            bad("key", &files.key, format!("cannot be read as a PEM private key: {}", pem_error(&e)))
        })?;
        let mut roots = RootCertStore::empty();
        for cert in certificates("ca", &files.ca)? {
            roots.add(cert).map_err(|e| bad("ca", &files.ca, format!("is no certificate authority: {e}")))?;
        }
        let roots = Arc::new(roots);
        let name = match &files.name {
            None => None,
            Some(text) => Some(server_name(text).ok_or_else(|| {
                StartError::Auth(format!("tls: name={text:?} is neither a DNS name nor an IP address"))
            })?),
        };
        let chains = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|e| bad("ca", &files.ca, e))?;
        let verifier = Arc::new(PeerVerifier { chains, name: name.clone() });
        let fault = |e: Error| match e {
            Error::InconsistentKeys(_) => bad(
                "key",
                &files.key,
                format!("is not the key of the certificate in {}", files.cert.display()),
            ),
            Error::InvalidCertificate(_) => bad("cert", &files.cert, e),
            other => bad("key", &files.key, other),
        };
        let mut server = versioned(ServerConfig::builder_with_provider(Arc::clone(&provider)))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(fault)?;
        server.alpn_protocols = vec![ALPN.to_vec()];
        // A resumed session would not look at the certificates again, which may have expired since.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let mut client = versioned(ClientConfig::builder_with_provider(provider))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(fault)?;
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.resumption = Resumption::disabled();
        // It would show the peer's name to whoever listens.
        client.enable_sni = false;
        Ok(Self { client: Arc::new(client), server: Arc::new(server), name })
    }

    /// For a connection that somebody opened to us.
    pub(super) fn acceptor(&self) -> Result<TlsIo, Reason> {
        ServerConnection::new(Arc::clone(&self.server))
            .map(|c| TlsIo::new(c.into(), false))
            .map_err(|e| fatal(&e))
    }

    /// For a connection that we open to this host.
    pub(super) fn initiator(&self, host: &str) -> Result<TlsIo, Reason> {
        let name = match &self.name {
            Some(name) => name.clone(),
            None => server_name(host).ok_or_else(|| {
                auth(format!("{host:?} is no name that a certificate can carry; set `name` of `tls`"))
            })?,
        };
        ClientConnection::new(Arc::clone(&self.client), name)
            .map(|c| TlsIo::new(c.into(), true))
            .map_err(|e| fatal(&e))
    }
}

fn versioned<S: rustls::ConfigSide>(
    builder: rustls::ConfigBuilder<S, rustls::WantsVersions>,
) -> Result<rustls::ConfigBuilder<S, rustls::WantsVerifier>, StartError> {
    builder
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| StartError::Auth(format!("tls: {e}")))
}

/// An IPv4 address in IPv6 clothes is the address that certificates carry.
fn server_name(text: &str) -> Option<ServerName<'static>> {
    match text.parse::<IpAddr>() {
        Ok(ip) => Some(ServerName::IpAddress(ip.to_canonical().into())),
        Err(_) => ServerName::try_from(text.to_owned()).ok(),
    }
}

/// Checks a client's chain, and that its certificate carries the common name where there is one.
#[derive(Debug)]
struct PeerVerifier {
    chains: Arc<dyn ClientCertVerifier>,
    name: Option<ServerName<'static>>,
}

impl ClientCertVerifier for PeerVerifier {
    /// None: who our authorities are is no stranger's business.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.chains.verify_client_cert(end_entity, intermediates, now)?;
        if let Some(name) = &self.name {
            verify_server_name(&ParsedCertificate::try_from(end_entity)?, name)?;
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chains.supported_verify_schemes()
    }
}

/// What came of bytes from the socket.
pub(super) enum Fed {
    /// They were taken.
    Taken,
    /// They were taken, and the TLS handshake is done: the control handshake's proofs have to be bound to this.
    Up([u8; 32]),
    /// The peer does not speak TLS. Nothing may be said to it but that.
    Plain,
    /// Close once what [`TlsIo::write`] still has is out.
    Broken(Reason),
}

/// The TLS state of one connection.
#[derive(Debug)]
pub(super) struct TlsIo {
    conn: Connection,
    initiator: bool,
    /// The first bytes, until they show whether this is TLS.
    head: Vec<u8>,
    is_tls: bool,
    up: bool,
    broken: bool,
    /// We have said that nothing follows.
    closed: bool,
    /// The peer has.
    ended: bool,
}

impl TlsIo {
    fn new(mut conn: Connection, initiator: bool) -> Self {
        conn.set_buffer_limit(Some(SEALED));
        Self {
            conn,
            initiator,
            head: Vec::new(),
            is_tls: false,
            up: false,
            broken: false,
            closed: false,
            ended: false,
        }
    }

    /// Whether frames can go out.
    pub(super) fn is_up(&self) -> bool {
        self.up && !self.broken && !self.closed
    }

    /// Whether the peer has said that nothing follows. What it sends after that is nobody's.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Bytes came from the socket; what they say goes into `plain`.
    pub(super) fn feed(&mut self, bytes: &[u8], plain: &mut Decoder) -> Fed {
        if self.broken {
            return Fed::Taken;
        }
        if self.is_tls {
            return self.take(bytes, plain);
        }
        self.head.extend_from_slice(bytes);
        match looks_like_tls(&self.head) {
            None => Fed::Taken,
            Some(true) => {
                self.is_tls = true;
                let head = std::mem::take(&mut self.head);
                self.take(&head, plain)
            }
            Some(false) => {
                self.broken = true;
                Fed::Plain
            }
        }
    }

    /// What the first bytes were, of a peer that does not speak TLS.
    pub(super) fn head(&self) -> &[u8] {
        &self.head
    }

    fn take(&mut self, mut bytes: &[u8], plain: &mut Decoder) -> Fed {
        let mut buf = [0u8; 16 << 10];
        while !bytes.is_empty() && !self.ended {
            // It takes a bounded part of what it is shown, and nothing once the peer has ended.
            match self.conn.read_tls(&mut bytes) {
                Ok(0) => break,
                Ok(_) => {}
                Err(e) => return self.broke(fatal(&Error::General(e.to_string()))),
            }
            match self.conn.process_new_packets() {
                Ok(state) => self.ended = state.peer_has_closed(),
                Err(e) => {
                    let reason = self.reason(&e);
                    return self.broke(reason);
                }
            }
            loop {
                match self.conn.reader().read(&mut buf) {
                    Ok(n) if n > 0 => plain.feed(&buf[..n]),
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    // Nothing more now, or the peer's last word; the socket's end says the rest.
                    Ok(_) | Err(_) => break,
                }
            }
        }
        if self.up || self.conn.is_handshaking() {
            return Fed::Taken;
        }
        if self.conn.alpn_protocol() != Some(ALPN) {
            return self
                .broke(auth("the peer's TLS is not kvxfer's (ALPN differs); check the address and port"));
        }
        self.up = true;
        match self.conn.export_keying_material([0u8; 32], BINDING, None) {
            Ok(binding) => Fed::Up(binding),
            Err(e) => self.broke(fatal(&e)),
        }
    }

    fn broke(&mut self, reason: Reason) -> Fed {
        self.broken = true;
        Fed::Broken(reason)
    }

    /// The words for an error, by the field that is to be set right.
    fn reason(&self, e: &Error) -> Reason {
        let (peer, this) = if self.initiator { ("acceptor", "initiator") } else { ("initiator", "acceptor") };
        if self.up && !matches!(e, Error::AlertReceived(_)) {
            let text = format!("a TLS record does not verify: {e}; somebody on the path changes it");
            return Reason::new(ReasonKind::PeerLost, text);
        }
        match e {
            Error::NoCertificatesPresented => {
                auth(format!("the {peer} presented no certificate; set `cert` and `key` of its `tls`"))
            }
            Error::InvalidCertificate(why) => auth(match why {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
                    "the {peer}'s certificate is not signed by the {this}'s `ca`; give both agents certificates of \
                     one authority, and its certificate as `ca`"
                ),
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => format!(
                    "the {peer}'s certificate (`cert` of its `tls`) has expired ({why}); issue a new one, and check \
                     both hosts' clocks"
                ),
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => format!(
                    "the {peer}'s certificate (`cert` of its `tls`) is not valid yet ({why}); check both hosts' clocks"
                ),
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                    format!(
                        "the {peer}'s certificate does not carry the name that is asked for ({why}); issue one with it, \
                     or set `name` of `tls` to one that every agent's certificate carries"
                    )
                }
                CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => format!(
                    "the {peer}'s certificate may not be used for this ({why}); agents connect both ways, so it needs \
                     serverAuth and clientAuth, or no extended key usage"
                ),
                other => format!("the {peer}'s certificate is not valid: {other}"),
            }),
            Error::AlertReceived(alert) => auth(format!(
                "the {peer} ended the connection ({}); its log says which",
                match alert {
                    AlertDescription::CertificateRequired => format!(
                        "it wants a certificate and the {this} presented none: set `cert` and `key` of `tls`"
                    ),
                    // The second, where the authorities bear the same name.
                    AlertDescription::UnknownCA | AlertDescription::DecryptError =>
                        format!("the {this}'s `cert` is not signed by the {peer}'s `ca`"),
                    AlertDescription::CertificateExpired => format!("the {this}'s `cert` has expired"),
                    AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => format!(
                        "it does not take the {this}'s `cert`: an authority, a name or a use is wrong"
                    ),
                    other => format!("TLS alert {other:?}"),
                }
            )),
            other => auth(format!("the TLS handshake with the {peer} failed: {other}")),
        }
    }

    /// Seals as many of these bytes as there is room for.
    pub(super) fn seal(&mut self, plain: &[u8]) -> usize {
        if self.is_up() { self.conn.writer().write(plain).unwrap_or(0) } else { 0 }
    }

    /// Whether sealed bytes wait for the socket.
    pub(super) fn wants_write(&self) -> bool {
        self.conn.wants_write()
    }

    /// Writes sealed bytes to the socket.
    pub(super) fn write(&mut self, socket: &mut dyn Write) -> std::io::Result<usize> {
        self.conn.write_tls(socket)
    }

    /// Says that nothing follows, so that the peer can tell an end from a cut.
    pub(super) fn close(&mut self) {
        if self.is_up() {
            self.closed = true;
            self.conn.send_close_notify();
        }
    }

    /// The socket ended: whether the peer had said so within TLS.
    pub(super) fn was_cut_off(&mut self) -> bool {
        let _ = self.conn.read_tls(&mut std::io::empty());
        let _ = self.conn.process_new_packets();
        matches!(self.conn.reader().read(&mut [0; 1]), Err(e) if e.kind() == ErrorKind::UnexpectedEof)
    }
}

pub(super) fn auth(text: impl std::fmt::Display) -> Reason {
    Reason::new(ReasonKind::AuthError, format!("authentication failed: tls: {text}"))
}

fn fatal(e: &Error) -> Reason {
    Reason::new(ReasonKind::Internal, format!("TLS failed: {e}"))
}
