//! [`RemoteKeys`]: encryption by age, seals of manifests, and tags of parts.
//!
//! - K1. Everything that is encrypted is encrypted for all recipients: those of the identities, and further ones.
//! - K2. Anybody who knows a recipient can encrypt for it. So a manifest also has a seal for each identity: a keyed
//!   BLAKE2b of its text, whose key is made of the identity's secret. A manifest without a seal of an identity at hand is
//!   refused, unless the user asks for it. The manifest has the checksums of the parts, so the seal covers these too.
//! - K3. The tag of a part depends on the part's bytes and, with encryption, on the first identity's secret. So a store
//!   cannot tell which known bytes a part holds. With recipients alone, tags are made of a key that lives as long as the
//!   process.

use std::fmt;
use std::io::{Read, Write};
use std::path::Path;
use std::str::FromStr;

use age::secrecy::{ExposeSecret, SecretString};
use age::{Decryptor, Encryptor, x25519};
use uuid::Uuid;

use crate::Result;
use crate::error::RemoteError;
use crate::manifest::{HexBytes, PartTag, Sum};

/// The keys that a command has. Without any, nothing is encrypted.
#[derive(Default)]
pub struct RemoteKeys {
    recipients: Vec<x25519::Recipient>,
    identities: Vec<x25519::Identity>,
    seal_keys: Vec<[u8; 32]>,
    tag_key: Option<[u8; 32]>,
    takes_unsealed: bool,
}

impl fmt::Debug for RemoteKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteKeys({} identities, {} recipients)", self.identities.len(), self.recipients.len())
    }
}

impl RemoteKeys {
    /// No keys: nothing is encrypted.
    pub fn none() -> Self {
        Self::default()
    }

    /// Reads files of identities (secret keys) and of recipients (public keys), in the format of `age-keygen`.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or holds something else than such keys.
    pub fn from_files<P: AsRef<Path>>(identities: &[P], recipients: &[P], recipient_texts: &[String]) -> Result<Self> {
        let mut keys = Self::none();
        for path in identities {
            let text = read(path.as_ref())?;
            for line in key_lines(text.expose_secret()) {
                // The line may be a secret, so the error does not show it.
                let identity =
                    x25519::Identity::from_str(line).map_err(|_| wrong_line(path.as_ref(), "AGE-SECRET-KEY-1..."))?;
                keys.recipients.push(identity.to_public());
                keys.seal_keys.push(derived(b"ubtrfs-seal", &identity));
                keys.tag_key = keys.tag_key.or(Some(derived(b"ubtrfs-tag", &identity)));
                keys.identities.push(identity);
            }
        }
        for path in recipients {
            let text = read(path.as_ref())?;
            for line in key_lines(text.expose_secret()) {
                let recipient = x25519::Recipient::from_str(line).map_err(|_| wrong_line(path.as_ref(), "age1..."))?;
                keys.recipients.push(recipient);
            }
        }
        for text in recipient_texts {
            let recipient = x25519::Recipient::from_str(text.trim());
            let wrong = |_| RemoteError::KeyFile("a recipient is a public key of age-keygen: age1...".to_owned());
            keys.recipients.push(recipient.map_err(wrong)?);
        }
        let asked = !identities.is_empty() || !recipients.is_empty() || !recipient_texts.is_empty();
        if asked && keys.recipients.is_empty() {
            return Err(RemoteError::KeyFile("the files hold no keys; make one with: age-keygen -o FILE".to_owned()));
        }
        if keys.tag_key.is_none() && asked {
            let random = [*Uuid::new_v4().as_bytes(), *Uuid::new_v4().as_bytes()].concat();
            keys.tag_key = random.try_into().ok();
        }
        Ok(keys)
    }

    /// Accepts manifests without a seal of an identity at hand (K2).
    #[must_use]
    pub fn with_unsealed(self, takes_unsealed: bool) -> Self {
        Self { takes_unsealed, ..self }
    }

    /// Whether everything is encrypted.
    pub fn encrypts(&self) -> bool {
        !self.recipients.is_empty()
    }

    /// Whether manifests can be read: they are not encrypted, or an identity is at hand.
    pub fn can_read(&self) -> bool {
        !self.encrypts() || !self.identities.is_empty()
    }

    /// Encrypts bytes for all recipients, or returns them if there is none.
    pub(crate) fn encrypt(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        if !self.encrypts() {
            return Ok(bytes);
        }
        let failed = |error: &dyn fmt::Display| RemoteError::KeyFile(format!("encryption failed: {error}"));
        let recipients = self.recipients.iter().map(|recipient| recipient as &dyn age::Recipient);
        let encryptor = Encryptor::with_recipients(recipients).map_err(|error| failed(&error))?;
        let mut out = Vec::with_capacity(bytes.len() + bytes.len() / 1024 + 1024);
        let written = encryptor.wrap_output(&mut out).and_then(|mut writer| {
            writer.write_all(&bytes)?;
            writer.finish().map(drop)
        });
        written.map_err(|error| failed(&error))?;
        Ok(out)
    }

    /// Decrypts an object, whose content has at most `most` bytes.
    pub(crate) fn decrypt(&self, object: &str, bytes: &[u8], most: u64) -> Result<Vec<u8>> {
        if !self.encrypts() {
            return Ok(bytes.to_vec());
        }
        let damaged = |what: String| RemoteError::damaged(object, what);
        let refused = |error: age::DecryptError| match error {
            age::DecryptError::NoMatchingKeys => RemoteError::Keys {
                object: object.to_owned(),
                what: "is encrypted for other keys; give the file with your secret key: --identity",
            },
            other => damaged(format!("it cannot be decrypted: {other}")),
        };
        let decryptor = Decryptor::new_buffered(bytes).map_err(refused)?;
        let identities = self.identities.iter().map(|identity| identity as &dyn age::Identity);
        let reader = decryptor.decrypt(identities).map_err(refused)?;
        let mut out = Vec::with_capacity(bytes.len());
        let read = reader.take(most.saturating_add(1)).read_to_end(&mut out);
        read.map_err(|error| damaged(format!("it cannot be decrypted: {error}")))?;
        if out.len() as u64 > most {
            return Err(damaged("it is larger than possible".to_owned()));
        }
        Ok(out)
    }

    /// The seals of a manifest's text, one for each identity (K2).
    pub(crate) fn seals(&self, text: &[u8]) -> Vec<Sum> {
        self.seal_keys.iter().map(|key| HexBytes(keyed(key, text))).collect()
    }

    /// Checks that one of the seals is of an identity at hand.
    pub(crate) fn check_seals(&self, object: &str, text: &[u8], seals: &[Sum]) -> Result<()> {
        if !self.encrypts() || self.takes_unsealed {
            return Ok(());
        }
        // Comparing BLAKE2b hashes takes the same time for all values.
        let own: Vec<blake2b_simd::Hash> = self.seal_keys.iter().map(|key| params().key(key).hash(text)).collect();
        if own.iter().any(|own| seals.iter().any(|seal| *own == seal.0[..])) {
            return Ok(());
        }
        Err(RemoteError::Keys {
            object: object.to_owned(),
            what: "has no seal of your identity, so anybody who knows the recipient may have written it; if it was \
                   pushed with recipients alone, give --unsealed",
        })
    }

    /// The tag of a part, made of the SHA-256 of its bytes (K3).
    pub(crate) fn tag(&self, sum: &Sum) -> PartTag {
        let hash = keyed(&self.tag_key.unwrap_or([0; 32]), &sum.0);
        let mut tag = [0; 16];
        tag.copy_from_slice(&hash[..16]);
        HexBytes(tag)
    }
}

fn params() -> blake2b_simd::Params {
    let mut params = blake2b_simd::Params::new();
    params.hash_length(32);
    params
}

fn keyed(key: &[u8; 32], bytes: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(params().key(key).hash(bytes).as_bytes());
    out
}

/// A key for one purpose, made of an identity's secret.
fn derived(purpose: &[u8], identity: &x25519::Identity) -> [u8; 32] {
    let mut out = [0; 32];
    let secret = identity.to_string();
    out.copy_from_slice(params().personal(purpose).hash(secret.expose_secret().as_bytes()).as_bytes());
    out
}

fn read(path: &Path) -> Result<SecretString> {
    // Whoever gives the key in place of its file does not want to see it in a log.
    if path.as_os_str().as_encoded_bytes().to_ascii_uppercase().starts_with(b"AGE-SECRET-KEY-") {
        let what = "give the file that has the secret key, not the key: other users see the arguments of programs";
        return Err(RemoteError::KeyFile(what.to_owned()));
    }
    let text = std::fs::read_to_string(path);
    let failed = |source| RemoteError::Host { what: format!("read the keys in {}", path.display()), source };
    Ok(SecretString::from(text.map_err(failed)?))
}

/// The lines of a file that are neither empty nor comments.
fn key_lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

fn wrong_line(path: &Path, form: &str) -> RemoteError {
    RemoteError::KeyFile(format!(
        "{} has a line that is neither a comment nor a key of the form {form}, as age-keygen makes it",
        path.display()
    ))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Keys of a new identity.
    pub(crate) fn new_keys() -> RemoteKeys {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, x25519::Identity::generate().to_string().expose_secret()).unwrap();
        RemoteKeys::from_files(&[path], &[], &[]).unwrap()
    }

    #[test]
    fn only_an_identity_decrypts_and_seals() {
        let (keys, others) = (new_keys(), new_keys());
        let secret = keys.encrypt(b"text".to_vec()).unwrap();
        assert_eq!(keys.decrypt("o", &secret, 4).unwrap(), b"text");
        assert!(keys.decrypt("o", &secret, 3).is_err(), "larger than possible");
        assert!(matches!(others.decrypt("o", &secret, 9), Err(RemoteError::Keys { .. })));
        let seals = keys.seals(b"text");
        keys.check_seals("o", b"text", &seals).unwrap();
        for (by, text, seals) in [(&keys, &b"texT"[..], &seals[..]), (&others, b"text", &seals), (&keys, b"text", &[])]
        {
            assert!(matches!(by.check_seals("o", text, seals), Err(RemoteError::Keys { .. })));
        }
        // Recipients alone: the manifest is encrypted, but not sealed.
        let public = keys.recipients[0].to_string();
        let sender = RemoteKeys::from_files::<&str>(&[], &[], &[public]).unwrap();
        assert!(sender.encrypts() && !sender.can_read() && sender.seals(b"text").is_empty());
        assert_eq!(keys.decrypt("o", &sender.encrypt(b"text".to_vec()).unwrap(), 4).unwrap(), b"text");
    }

    #[test]
    fn a_wrong_key_file_is_refused_without_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "AGE-SECRET-KEY-1HUNTER2\n").unwrap();
        let error = RemoteKeys::from_files(&[&path], &[], &[]).unwrap_err().to_string();
        assert!(!error.contains("HUNTER2"), "{error}");
        std::fs::write(&path, "# nothing\n").unwrap();
        assert!(RemoteKeys::from_files(&[&path], &[], &[]).is_err());
        assert!(RemoteKeys::from_files::<&Path>(&[], &[&path], &[]).is_err());
    }

    #[test]
    fn damaged_ciphertext_never_panics() {
        let keys = new_keys();
        let secret = keys.encrypt(vec![7; 1000]).unwrap();
        for at in 0..secret.len() {
            let mut bad = secret.clone();
            bad[at] ^= 1;
            assert!(keys.decrypt("o", &bad, 1000).is_err(), "byte {at}");
            assert!(keys.decrypt("o", &secret[..at], 1000).is_err(), "cut at {at}");
        }
    }
}
