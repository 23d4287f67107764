//! POSIX ACLs: conversion between the value of an ACL attribute and the text of a `SCHILY.acl.*` record in a tar
//! archive.
//!
//! The value of the attribute is the version number 2 (u32), followed by entries: tag (u16), permissions (u16) and id
//! (u32). The entries are sorted by tag and id.

use anyhow::{Context, bail};

/// Name of the attribute that holds the access ACL.
pub(crate) const ACCESS: &[u8] = b"system.posix_acl_access";
/// Name of the attribute that holds the default ACL.
pub(crate) const DEFAULT: &[u8] = b"system.posix_acl_default";

/// Parses `user::rwx,user:NAME:r-x[:ID],group::r-x,mask::r-x,other::r--`, separated by commas or newlines, into the
/// value of an ACL attribute. Without `:ID`, `NAME` is a number, or is looked up in this system's `/etc/passwd` or
/// `/etc/group`.
pub(crate) fn from_text(text: &[u8]) -> anyhow::Result<Vec<u8>> {
    parse(text, id_of)
}

/// Parses like [`from_text`], with `id_of` to look up a name in a file of users or groups.
fn parse(text: &[u8], id_of: impl Fn(&str, &str) -> Option<u32>) -> anyhow::Result<Vec<u8>> {
    let text = std::str::from_utf8(text).context("an ACL is not text")?;
    let mut entries = Vec::new();
    for entry in text.split([',', '\n']).map(|entry| entry.split('#').next().unwrap_or_default().trim()) {
        if entry.is_empty() {
            continue;
        }
        let wrong = || format!("wrong ACL entry '{entry}'");
        let mut fields = entry.split(':').map(str::trim);
        let (Some(kind), Some(mut name)) = (fields.next(), fields.next()) else { bail!(wrong()) };
        let mut perms = fields.next();
        if perms.is_none() && matches!(kind, "mask" | "m" | "other" | "o") {
            // In the short form `other:r--`, the second field holds the permissions.
            perms = Some(std::mem::take(&mut name));
        }
        let bits = perms.and_then(permissions).with_context(wrong)?;
        let database = match kind {
            "user" | "u" => Some(("/etc/passwd", USER_OBJ)),
            "group" | "g" => Some(("/etc/group", GROUP_OBJ)),
            _ => None,
        };
        let (tag, id) = match (kind, database) {
            (_, Some((_, tag))) if name.is_empty() => (tag, NO_ID),
            (_, Some((file, tag))) => {
                let id = match fields.next().unwrap_or(name).parse() {
                    Ok(id) => id,
                    Err(_) => id_of(file, name).with_context(|| format!("ACL: '{name}' is not in {file}"))?,
                };
                (tag * 2, id)
            }
            ("mask" | "m", _) if name.is_empty() => (MASK, NO_ID),
            ("other" | "o", _) if name.is_empty() => (OTHER, NO_ID),
            _ => bail!(wrong()),
        };
        entries.push((tag, id, bits));
    }
    entries.sort_unstable();
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, id, bits) in entries {
        value.extend(tag.to_le_bytes());
        value.extend(bits.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    Ok(value)
}

/// The text form of an ACL attribute's value, with ids as numbers; `None` if the value is not an ACL.
pub(crate) fn to_text(value: &[u8]) -> Option<String> {
    let entries = value.strip_prefix(&2u32.to_le_bytes())?;
    let mut texts = Vec::new();
    for entry in entries.chunks(8) {
        let &[t0, t1, b0, b1, i0, i1, i2, i3] = entry else { return None };
        let (tag, bits, id) =
            (u16::from_le_bytes([t0, t1]), u16::from_le_bytes([b0, b1]), u32::from_le_bytes([i0, i1, i2, i3]));
        let (kind, named) = match tag {
            USER_OBJ => ("user", false),
            GROUP_OBJ => ("group", false),
            MASK => ("mask", false),
            OTHER => ("other", false),
            tag if tag == USER_OBJ * 2 => ("user", true),
            tag if tag == GROUP_OBJ * 2 => ("group", true),
            _ => return None,
        };
        if bits > 7 {
            return None;
        }
        let letters: String = [(4, 'r'), (2, 'w'), (1, 'x')]
            .map(|(bit, letter)| if bits & bit != 0 { letter } else { '-' })
            .iter()
            .collect();
        let name = if named { id.to_string() } else { String::new() };
        texts.push(format!("{kind}:{name}:{letters}"));
    }
    (!texts.is_empty()).then(|| texts.join(","))
}

fn permissions(text: &str) -> Option<u16> {
    text.chars().try_fold(0, |bits, letter| match letter {
        'r' => Some(bits | 4),
        'w' => Some(bits | 2),
        'x' => Some(bits | 1),
        '-' => Some(bits),
        _ => None,
    })
}

fn id_of(file: &str, name: &str) -> Option<u32> {
    let text = std::fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    })
}

// The tag of a named user is twice the tag of the owner, and the tag of a named group is twice the tag of the owning
// group.
const USER_OBJ: u16 = 1;
const GROUP_OBJ: u16 = 4;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const NO_ID: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut value = vec![2, 0, 0, 0];
        for (tag, bits, id) in entries {
            value.extend(tag.to_le_bytes());
            value.extend(bits.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        value
    }

    #[test]
    fn text_becomes_the_attribute() {
        let id_of = |file: &str, name: &str| (file == "/etc/passwd" && name == "root").then_some(0);
        let from_text = |text: &[u8]| parse(text, id_of);
        let all =
            bytes(&[(1, 7, NO_ID), (2, 5, 0), (2, 4, 1000), (4, 4, NO_ID), (8, 6, 7), (16, 7, NO_ID), (32, 0, NO_ID)]);
        let text = b"user::rwx,user:1000:r--,user:root:r-x,group::r--,group:x:rw-:7,mask::rwx,other::---";
        assert_eq!(from_text(text).unwrap(), all);
        assert_eq!(from_text(to_text(&all).unwrap().as_bytes()).unwrap(), all);
        for wrong in [&all[..5], &all[1..], &[2, 0, 0, 0], &bytes(&[(3, 7, 0)]), &bytes(&[(1, 8, 0)])] {
            assert_eq!(to_text(wrong), None);
        }
        assert_eq!(
            from_text(b"u::r\ng::r\no:r # all").unwrap(),
            bytes(&[(1, 4, NO_ID), (4, 4, NO_ID), (32, 4, NO_ID)])
        );
        for wrong in ["user", "user:no-such-user:r--", "what::r--", "user::q", "mask:x:r--"] {
            from_text(wrong.as_bytes()).unwrap_err();
        }
    }
}
