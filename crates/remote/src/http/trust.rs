//! Whom to believe: the certificates that connections are checked against.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

use crate::fault::{Fault, FaultKind};

/// How safe connections are made. There is no way to do without the check.
///
/// The certificates are those of `ca_file`, else those that the system trusts (`SSL_CERT_FILE` and `SSL_CERT_DIR` name
/// others), else, where a system has none, as small containers do, those that Mozilla trusts.
pub(crate) fn config(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, Fault> {
    let mut roots = RootCertStore::empty();
    match ca_file {
        Some(path) => {
            for certificate in certificates(path)? {
                roots
                    .add(certificate)
                    .map_err(|fault| unusable(path, &fault.to_string()))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|fault| FaultKind::Tls {
            authority: "any host".to_owned(),
            source: io::Error::other(fault),
        })?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let pem = fs::read(path).map_err(|fault| unusable(path, &fault.to_string()))?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match certificates {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(unusable(path, "it holds no certificate in PEM")),
        Err(fault) => Err(unusable(path, &fault.to_string())),
    }
}

fn unusable(path: &Path, why: &str) -> Fault {
    let path = path.to_string_lossy();
    FaultKind::Option(format!(
        "the CA file {} cannot be used: {why}",
        ingot_format::Quoted(&path)
    ))
    .into()
}
