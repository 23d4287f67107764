//! [`SnapshotManifest`]: the description of a snapshot in a store.
//!
//! A manifest is text: one line of JSON, and lines that prove it.
//!
//! ```text
//! {"format":"ubtrfs-snapshot","version":1,"snapshot":{...}}
//! sha256 HEX         of the first line
//! seal HEX           of the first line, by an identity's secret; one line for each identity, if the store is encrypted
//! ```
//!
//! With encryption, the object is this text encrypted by age.
//!
//! - M1. A manifest names only parts below its own key, because the name of a part is made of the key and the record.
//! - M2. All numbers of a manifest are checked when it is decoded ([`SnapshotManifest::check`]). So memory for a part
//!   is bounded by [`MOST_PART_BYTES`], and for a manifest by [`MOST_MANIFEST_BYTES`].
//! - M3. A manifest that is found under another snapshot's key is refused.

use std::fmt::{self, Display};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::Result;
use crate::error::RemoteError;
use crate::keys::RemoteKeys;

/// Identifies a sent subvolume: the UUID by which receivers know it, and the transaction that changed it last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotKey {
    /// UUID of the subvolume where it was made.
    pub uuid: Uuid,
    /// Transaction that changed the subvolume last, where it was made.
    pub ctransid: u64,
}

impl Display for SnapshotKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.uuid, self.ctransid)
    }
}

impl FromStr for SnapshotKey {
    type Err = ();

    /// Parses the form of `Display`, and no other form of the same UUID.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (uuid, ctransid) = text.rsplit_once('-').ok_or(())?;
        let key = Self { uuid: uuid.parse().map_err(drop)?, ctransid: ctransid.parse().map_err(drop)? };
        if key.to_string() == text { Ok(key) } else { Err(()) }
    }
}

/// A point in time, as the filesystem has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotTime {
    /// Seconds since 1970.
    pub sec: i64,
    /// Nanoseconds.
    pub nsec: u32,
}

/// A snapshot in a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotManifest {
    /// The snapshot.
    pub key: SnapshotKey,
    /// Its name, which the stream gives it.
    #[serde(with = "name_bytes")]
    pub name: Vec<u8>,
    /// The snapshot from which the stream is the difference; `None` if the stream is complete.
    pub parent: Option<SnapshotKey>,
    /// UUID of the subvolume of which this is a snapshot; `None` if that is unknown.
    pub source: Option<Uuid>,
    /// Generation of the subvolume's root.
    pub generation: u64,
    /// When the snapshot was made.
    pub created: SnapshotTime,
    /// When it was pushed, in seconds since 1970.
    pub pushed: i64,
    /// Bytes of the stream.
    pub stream_bytes: u64,
    /// Bytes of all parts in the store.
    pub stored_bytes: u64,
    /// Bytes of the stream in each part but the last.
    pub part_bytes: u64,
    /// The parts, in the order of the stream.
    pub parts: Vec<PartRecord>,
}

/// A part of a stream in a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartRecord {
    /// Bytes of the stream.
    pub bytes: u64,
    /// SHA-256 of these bytes.
    pub sha256: Sum,
    /// Whether they are compressed by zstd.
    pub zstd: bool,
    /// Bytes in the store.
    pub stored_bytes: u64,
    /// SHA-256 of the bytes in the store.
    pub stored_sha256: Sum,
    /// What an interrupted push finds the part by.
    pub tag: PartTag,
}

/// Bytes of a checksum, in JSON as hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HexBytes<const N: usize>(pub [u8; N]);

/// A SHA-256.
pub(crate) type Sum = HexBytes<32>;
/// The tag of a part; see [`RemoteKeys::tag`].
pub(crate) type PartTag = HexBytes<16>;

impl<const N: usize> Display for HexBytes<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl<const N: usize> fmt::Debug for HexBytes<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl<const N: usize> FromStr for HexBytes<N> {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err("a checksum has the digits 0-9 and a-f"),
        };
        let mut bytes = [0; N];
        if text.len() != N * 2 {
            return Err("a checksum has another length");
        }
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Ok(Self(bytes))
    }
}

impl<const N: usize> Serialize for HexBytes<N> {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de, const N: usize> Deserialize<'de> for HexBytes<N> {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Computes the SHA-256 of bytes.
pub(crate) fn sum(bytes: &[u8]) -> Sum {
    HexBytes(Sha256::digest(bytes).into())
}

impl PartRecord {
    /// The name of the part's object below `parts/KEY/`.
    pub(crate) fn object(&self, index: usize) -> String {
        let Self { tag, zstd, stored_sha256, stored_bytes, .. } = *self;
        PartName { index, tag, zstd, stored_sha256, stored_bytes }.to_string()
    }
}

/// What the name of a part's object says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartName {
    pub(crate) index: usize,
    pub(crate) tag: PartTag,
    pub(crate) zstd: bool,
    pub(crate) stored_sha256: Sum,
    pub(crate) stored_bytes: u64,
}

impl Display for PartName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let coding = if self.zstd { ZSTD } else { RAW };
        write!(f, "{:08}-{}-{coding}-{}-{}", self.index, self.tag, self.stored_sha256, self.stored_bytes)
    }
}

impl FromStr for PartName {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut words = text.split('-');
        let mut next = || words.next().ok_or(());
        let name = Self {
            index: next()?.parse().map_err(drop)?,
            tag: next()?.parse().map_err(drop)?,
            zstd: match next()? {
                ZSTD => true,
                RAW => false,
                _ => return Err(()),
            },
            stored_sha256: next()?.parse().map_err(drop)?,
            stored_bytes: next()?.parse().map_err(drop)?,
        };
        if name.to_string() == text { Ok(name) } else { Err(()) }
    }
}

impl SnapshotManifest {
    /// The name for people: bytes that are not text are replaced.
    pub fn shown_name(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }

    /// The name of the object of a part, below the place in the store.
    pub fn part_object(&self, index: usize) -> String {
        let name = self.parts.get(index).map(|part| part.object(index)).unwrap_or_default();
        format!("{PARTS}/{}/{name}", self.key)
    }

    /// Encodes the manifest for a store.
    pub(crate) fn encode(&self, keys: &RemoteKeys) -> Result<Vec<u8>> {
        self.check(&manifest_object(&self.key, keys.encrypts()))?;
        let written = Written { format: FORMAT.to_owned(), version: VERSION, snapshot: self.clone() };
        let mut text = serde_json::to_vec(&written)
            .map_err(|error| RemoteError::damaged(self.key.to_string(), format!("it cannot be written: {error}")))?;
        let proof = sum(&text);
        let seals = keys.seals(&text);
        text.extend_from_slice(format!("\nsha256 {proof}\n").as_bytes());
        for seal in seals {
            text.extend_from_slice(format!("seal {seal}\n").as_bytes());
        }
        keys.encrypt(text)
    }

    /// Decodes a manifest that was found as `object`.
    pub(crate) fn decode(object: &str, key: &SnapshotKey, bytes: &[u8], keys: &RemoteKeys) -> Result<Self> {
        let text = keys.decrypt(object, bytes, MOST_MANIFEST_BYTES)?;
        let damaged = |what: &str| RemoteError::damaged(object, what);
        let mut lines = text.split(|byte| *byte == b'\n');
        let json = lines.next().unwrap_or_default();
        let (mut proof, mut seals) = (None, Vec::new());
        for line in lines.filter(|line| !line.is_empty()).take(MOST_LINES) {
            let line = std::str::from_utf8(line).map_err(|_| damaged("it is not text"))?;
            match line.split_once(' ') {
                Some(("sha256", hex)) => proof = Some(hex.parse::<Sum>().map_err(damaged)?),
                Some(("seal", hex)) => seals.push(hex.parse::<Sum>().map_err(damaged)?),
                _ => return Err(damaged("it has an unknown line")),
            }
        }
        if proof != Some(sum(json)) {
            return Err(damaged("it does not match its own SHA-256"));
        }
        keys.check_seals(object, json, &seals)?;
        let head: Head = serde_json::from_slice(json).map_err(|_| damaged("it is not a manifest"))?;
        if head.format != FORMAT {
            return Err(damaged("it is not a manifest of ubtrfs"));
        }
        if head.version != VERSION {
            return Err(RemoteError::Version { object: object.to_owned(), found: head.version, known: VERSION });
        }
        let manifest: Self = serde_json::from_slice::<Written>(json)
            .map_err(|error| damaged(&format!("it does not follow the format: {error}")))?
            .snapshot;
        if manifest.key != *key {
            return Err(damaged(&format!("it is the manifest of another snapshot, {}", manifest.key)));
        }
        manifest.check(object)?;
        Ok(manifest)
    }

    /// Checks all numbers and names (M2).
    fn check(&self, object: &str) -> Result<()> {
        let damaged = |what: String| Err(RemoteError::damaged(object, what));
        let is_name = !matches!(self.name.as_slice(), b"" | b"." | b"..")
            && self.name.len() <= MOST_NAME_BYTES
            && !self.name.iter().any(|byte| matches!(byte, b'/' | 0));
        if !is_name {
            return damaged("the snapshot has no possible name".to_owned());
        }
        if self.parent == Some(self.key) {
            return damaged("the snapshot is its own parent".to_owned());
        }
        if self.created.nsec >= 1_000_000_000 {
            return damaged("its time is no time".to_owned());
        }
        if !(1..=MOST_PART_BYTES).contains(&self.part_bytes) {
            return damaged(format!("parts of {} bytes are not possible", self.part_bytes));
        }
        if self.parts.is_empty() || self.parts.len() > MOST_PARTS {
            return damaged(format!("{} parts are not possible", self.parts.len()));
        }
        let last = self.parts.len() - 1;
        let (mut stream, mut stored) = (0_u64, 0_u64);
        for (index, part) in self.parts.iter().enumerate() {
            let is_len = match index == last {
                true => (1..=self.part_bytes).contains(&part.bytes),
                false => part.bytes == self.part_bytes,
            };
            if !is_len || !(1..=most_stored(part.bytes)).contains(&part.stored_bytes) {
                return damaged(format!("part {index} has impossible sizes"));
            }
            // Both terms are at most `MOST_PARTS` times `most_stored(MOST_PART_BYTES)`.
            stream += part.bytes;
            stored += part.stored_bytes;
        }
        if (stream, stored) != (self.stream_bytes, self.stored_bytes) {
            return damaged("the sizes of the parts do not add up to those of the snapshot".to_owned());
        }
        Ok(())
    }
}

/// The most bytes that a part of this many bytes may have in a store: encryption and incompressible data add a little.
pub(crate) fn most_stored(bytes: u64) -> u64 {
    bytes + bytes / 256 + (64 << 10)
}

/// The name of a manifest below the place in the store.
pub(crate) fn manifest_object(key: &SnapshotKey, is_encrypted: bool) -> String {
    format!("{SNAPSHOTS}/{key}{}", if is_encrypted { ENCRYPTED } else { PLAIN })
}

/// The snapshot and the encryption that the last name of a manifest's object tells.
pub(crate) fn parse_manifest_name(name: &str) -> Option<(SnapshotKey, bool)> {
    let (key, is_encrypted) = match name.strip_suffix(ENCRYPTED) {
        Some(key) => (key, true),
        None => (name.strip_suffix(PLAIN)?, false),
    };
    Some((key.parse().ok()?, is_encrypted))
}

/// The first fields of a manifest of any version.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
}

/// The JSON of a manifest.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    format: String,
    version: u64,
    snapshot: SnapshotManifest,
}

/// Names are text in JSON if they are UTF-8, and a list of bytes otherwise.
mod name_bytes {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum NameForm {
        Text(String),
        Bytes(Vec<u8>),
    }

    pub(super) fn serialize<S: Serializer>(name: &[u8], to: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(name) {
            Ok(text) => to.serialize_str(text),
            Err(_) => name.serialize(to),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        Ok(match NameForm::deserialize(from)? {
            NameForm::Text(text) => text.into_bytes(),
            NameForm::Bytes(bytes) => bytes,
        })
    }
}

const FORMAT: &str = "ubtrfs-snapshot";
const VERSION: u64 = 1;
/// The folder of the manifests.
pub(crate) const SNAPSHOTS: &str = "snapshots";
/// The folder of the parts.
pub(crate) const PARTS: &str = "parts";
/// In the names of parts that are compressed, and of those that are not.
const ZSTD: &str = "zstd";
const RAW: &str = "raw";
const PLAIN: &str = ".json";
const ENCRYPTED: &str = ".age";
/// Largest manifest: about 200,000 parts.
pub(crate) const MOST_MANIFEST_BYTES: u64 = 64 << 20;
/// Largest number of parts of a snapshot.
pub(crate) const MOST_PARTS: usize = 150_000;
/// Largest part.
pub(crate) const MOST_PART_BYTES: u64 = 256 << 20;
/// Longest name in btrfs.
const MOST_NAME_BYTES: usize = 255;
/// Lines after the first one.
const MOST_LINES: usize = 1000;

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn key(nr: u128) -> SnapshotKey {
        SnapshotKey { uuid: Uuid::from_u128(nr), ctransid: 7 }
    }

    pub(crate) fn manifest() -> SnapshotManifest {
        let part = |bytes| PartRecord {
            bytes,
            sha256: sum(b"a"),
            zstd: true,
            stored_bytes: 10,
            stored_sha256: sum(b"b"),
            tag: HexBytes([5; 16]),
        };
        SnapshotManifest {
            key: key(1),
            name: b"monday".to_vec(),
            parent: Some(key(2)),
            source: None,
            generation: 9,
            created: SnapshotTime { sec: 100, nsec: 5 },
            pushed: 200,
            stream_bytes: 150,
            stored_bytes: 20,
            part_bytes: 100,
            parts: vec![part(100), part(50)],
        }
    }

    fn decode(text: &[u8]) -> Result<SnapshotManifest> {
        SnapshotManifest::decode("m", &key(1), text, &RemoteKeys::none())
    }

    /// Signs a changed line of JSON, as an attacker can without encryption.
    fn proven(json: &[u8]) -> Vec<u8> {
        [json, format!("\nsha256 {}\n", sum(json)).as_bytes()].concat()
    }

    #[test]
    fn manifests_come_back() {
        for name in [b"monday".to_vec(), b"\xff\n\"".to_vec()] {
            let manifest = SnapshotManifest { name, ..manifest() };
            assert_eq!(decode(&manifest.encode(&RemoteKeys::none()).unwrap()).unwrap(), manifest);
        }
    }

    #[test]
    fn each_wrong_field_is_refused() {
        let good = serde_json::to_value(Written { format: FORMAT.into(), version: VERSION, snapshot: manifest() });
        let good = good.unwrap();
        let changes: &[(&str, serde_json::Value)] = &[
            ("/version", 2.into()),
            ("/format", "x".into()),
            ("/snapshot/key/uuid", "00000000-0000-0000-0000-000000000009".into()),
            ("/snapshot/key/ctransid", 8.into()),
            ("/snapshot/name", "".into()),
            ("/snapshot/name", "..".into()),
            ("/snapshot/name", "a/b".into()),
            ("/snapshot/name", "a\0".into()),
            ("/snapshot/name", "x".repeat(256).into()),
            ("/snapshot/parent", serde_json::json!({"uuid": "00000000-0000-0000-0000-000000000001", "ctransid": 7})),
            ("/snapshot/part_bytes", 0.into()),
            ("/snapshot/part_bytes", u64::MAX.into()),
            ("/snapshot/stream_bytes", 151.into()),
            ("/snapshot/stored_bytes", u64::MAX.into()),
            ("/snapshot/parts", serde_json::json!([])),
            ("/snapshot/parts/0/bytes", 99.into()),
            ("/snapshot/parts/1/bytes", 101.into()),
            ("/snapshot/parts/1/stored_bytes", u64::MAX.into()),
            ("/snapshot/parts/1/sha256", "00".into()),
            ("/snapshot/parts/1/tag", "ZZ".repeat(16).into()),
            ("/snapshot/created/nsec", 1_000_000_000.into()),
        ];
        assert!(decode(&proven(good.to_string().as_bytes())).is_ok());
        for (at, value) in changes {
            let mut bad = good.clone();
            *bad.pointer_mut(at).unwrap() = value.clone();
            let error = decode(&proven(bad.to_string().as_bytes())).unwrap_err();
            let is_version = matches!(error, RemoteError::Version { found: 2, .. });
            assert!(is_version == (*at == "/version"), "{at}: {error}");
        }
        let mut bad = good;
        bad["snapshot"]["more"] = 1.into();
        assert!(decode(&proven(bad.to_string().as_bytes())).is_err(), "unknown fields are refused");
    }

    #[test]
    fn names_of_objects_have_one_form() {
        let name = manifest().parts[0].object(3);
        assert_eq!(name.parse::<PartName>().unwrap().index, 3);
        assert!(name.replacen('0', "", 1).parse::<PartName>().is_err());
        assert!(name.to_uppercase().parse::<PartName>().is_err());
        for is_encrypted in [false, true] {
            let object = manifest_object(&key(1), is_encrypted);
            let name = object.rsplit('/').next().unwrap();
            assert_eq!(parse_manifest_name(name), Some((key(1), is_encrypted)));
            assert_eq!(parse_manifest_name(&format!("0{name}")), None);
            assert_eq!(parse_manifest_name(&name.replace("1-7", "1-07")), None);
        }
    }

    proptest! {
        #[test]
        fn changed_manifests_never_panic(at in 0_usize..900, byte: u8, cut in 0_usize..900, proves: bool) {
            let mut text = manifest().encode(&RemoteKeys::none()).unwrap();
            let json_len = text.iter().position(|byte| *byte == b'\n').unwrap();
            let (at, cut) = (at % text.len(), cut % text.len());
            text[at] = byte;
            let _ = decode(&text[..cut]);
            if proves {
                let _ = decode(&proven(&text[..json_len.min(cut)]));
                let _ = decode(&proven(&text[..json_len]));
            }
        }
    }
}
