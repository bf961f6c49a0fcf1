//! Certificates for tests, and raw TLS connections.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use kvxfer_engine::TlsConfig;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;

/// Where every test agent listens, and so what most certificates carry.
pub const HERE: &str = "127.0.0.1";

/// An authority with a folder for what it issues.
pub struct Authority {
    dir: tempfile::TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let this = Self { dir: tempfile::tempdir().unwrap(), issuer };
        std::fs::write(this.ca(), this.issuer.pem()).unwrap();
        this
    }

    pub fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn issue(&self, file: &str, names: &[&str]) -> TlsConfig {
        self.issue_with(file, names, |_| {})
    }

    pub fn expired(&self, file: &str, names: &[&str]) -> TlsConfig {
        self.issue_with(file, names, |p| {
            (p.not_before, p.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
        })
    }

    pub fn issue_with(
        &self,
        file: &str,
        names: &[&str],
        f: impl FnOnce(&mut CertificateParams),
    ) -> TlsConfig {
        let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        f(&mut params);
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let config = TlsConfig {
            cert: self.path(&format!("{file}.pem")),
            key: self.path(&format!("{file}.key")),
            ca: self.ca(),
            name: None,
        };
        std::fs::write(&config.cert, cert.pem()).unwrap();
        std::fs::write(&config.key, key.serialize_pem()).unwrap();
        config
    }
}

fn roots(tls: &TlsConfig) -> Arc<RootCertStore> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&tls.ca).unwrap()).unwrap();
    Arc::new(roots)
}

fn pair(tls: &TlsConfig) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    (vec![CertificateDer::from_pem_file(&tls.cert).unwrap()], PrivateKeyDer::from_pem_file(&tls.key).unwrap())
}

/// A client of ours that is no agent; `with_cert` says whether it shows its certificate.
pub fn client(
    tls: &TlsConfig,
    with_cert: bool,
    stream: TcpStream,
) -> StreamOwned<ClientConnection, TcpStream> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots(tls));
    let (chain, key) = pair(tls);
    let mut config = if with_cert {
        builder.with_client_auth_cert(chain, key).unwrap()
    } else {
        builder.with_no_client_auth()
    };
    config.alpn_protocols = vec![b"kvxfer/1".to_vec()];
    let name = ServerName::try_from(HERE).unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), stream)
}

/// A server that is no agent.
pub fn server(tls: &TlsConfig, stream: TcpStream) -> StreamOwned<ServerConnection, TcpStream> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(roots(tls), Arc::clone(&provider)).build().unwrap();
    let (chain, key) = pair(tls);
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![b"kvxfer/1".to_vec()];
    StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), stream)
}
