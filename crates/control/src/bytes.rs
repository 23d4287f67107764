//! Names and paths in JSON: a string if they are UTF-8, else `{"hex": "..."}`.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Repr<'t> {
    Text(std::borrow::Cow<'t, str>),
    Hex { hex: std::borrow::Cow<'t, str> },
}

pub(crate) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Repr::Text(text.into()),
        Err(_) => Repr::Hex { hex: ubtrfs_format::node::hex(bytes).into() },
    }
    .serialize(serializer)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    match Repr::deserialize(deserializer)? {
        Repr::Text(text) => Ok(text.into_owned().into_bytes()),
        Repr::Hex { hex } => from_hex(&hex).ok_or_else(|| D::Error::custom("no hexadecimal digits")),
    }
}

/// Arbitrary bytes, as a string of hexadecimal digits.
pub(crate) mod hex {
    use std::borrow::Cow;

    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&ubtrfs_format::node::hex(bytes))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        super::from_hex(&text).ok_or_else(|| D::Error::custom("no hexadecimal digits"))
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |digit: &u8| char::from(*digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let byte = |pair: &[u8]| match pair {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    };
    text.as_bytes().chunks(2).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Name(#[serde(with = "crate::bytes")] Vec<u8>);

    #[test]
    fn bytes_come_back() {
        for bytes in [&b""[..], b"plain", b"\xff\x00 /", "\u{e4}\"".as_bytes()] {
            let text = serde_json::to_string(&Name(bytes.to_vec())).unwrap();
            assert_eq!(serde_json::from_str::<Name>(&text).unwrap().0, bytes, "{text}");
        }
        for wrong in [r#"{"hex":"f"}"#, r#"{"hex":"zz"}"#, r#"{"hex":"é"}"#, "7", r#"{}"#] {
            assert!(serde_json::from_str::<Name>(wrong).is_err(), "{wrong}");
        }
    }
}
