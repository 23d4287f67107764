//! Owners as chown reads them: `USER`, `USER:GROUP`, `USER:`, `:GROUP`; numbers, or names of this system.
//!
//! An image may come from a system with other users, so names in an image's own `/etc/passwd` are not looked up: a name
//! always means the user of the system on which the command runs.

use std::fs;

/// The ids to set. At least one is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NewOwner {
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
}

impl NewOwner {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        parse(text, &fs::read(USERS).unwrap_or_default(), &fs::read(GROUPS).unwrap_or_default())
    }
}

/// Parses with these lists of users and groups. As with chown, a name that consists of digits is a name first.
fn parse(text: &str, users: &[u8], groups: &[u8]) -> Result<NewOwner, String> {
    let (user, group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (text, None),
    };
    if user.is_empty() && group.is_none_or(str::is_empty) {
        return Err(format!("'{text}' is not an owner; write USER, USER:GROUP or :GROUP"));
    }
    let uid = match user {
        "" => None,
        user => Some(id_of(users, user).ok_or_else(|| {
            format!("there is no user '{user}' in this system's {USERS}; write the number, or another name")
        })?),
    };
    let gid = match group {
        None => None,
        // `USER:` stands for the user's own group.
        Some("") => Some(field(users, user, 3).ok_or_else(|| {
            format!("'{user}' is not the name of a user in {USERS}, so its group is unknown; write USER:GROUP")
        })?),
        Some(group) => Some(id_of(groups, group).ok_or_else(|| {
            format!("there is no group '{group}' in this system's {GROUPS}; write the number, or another name")
        })?),
    };
    Ok(NewOwner { uid, gid })
}

/// The id of a name in a list, or the number that the name is.
fn id_of(list: &[u8], name: &str) -> Option<u32> {
    field(list, name, 2).or_else(|| number(name))
}

/// The number in a field of the line with this name.
fn field(list: &[u8], name: &str, index: usize) -> Option<u32> {
    let mut lines = list.split(|byte| *byte == b'\n').map(|line| line.split(|byte| *byte == b':'));
    let mut line = lines.find(|line| line.clone().next() == Some(name.as_bytes()))?;
    number(std::str::from_utf8(line.nth(index)?).ok()?)
}

/// The highest number is not an id, because it means "do not change" to chown(2).
fn number(text: &str) -> Option<u32> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|id| is_number && *id != u32::MAX)
}

const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";

#[cfg(test)]
mod tests {
    use super::*;

    const LIST_OF_USERS: &[u8] =
        b"root:x:0:0:root:/root:/bin/sh\nann:x:1000:100:\xc4nn:/home/ann:/bin/sh\n7:x:1007:8::/:\n";
    const LIST_OF_GROUPS: &[u8] = b"root:x:0:\nusers:x:100:ann\n";

    fn parsed(text: &str) -> Option<(Option<u32>, Option<u32>)> {
        parse(text, LIST_OF_USERS, LIST_OF_GROUPS).ok().map(|change| (change.uid, change.gid))
    }

    #[test]
    fn owners_are_names_or_numbers() {
        assert_eq!(parsed("ann"), Some((Some(1000), None)));
        assert_eq!(parsed("ann:users"), Some((Some(1000), Some(100))));
        assert_eq!(parsed("ann:"), Some((Some(1000), Some(100))));
        assert_eq!(parsed(":users"), Some((None, Some(100))));
        assert_eq!(parsed("5:6"), Some((Some(5), Some(6))));
        assert_eq!(parsed("7"), Some((Some(1007), None)), "a name of digits");
        assert_eq!(parsed("4294967294:0"), Some((Some(u32::MAX - 1), Some(0))));
    }

    #[test]
    fn what_is_no_owner_is_refused() {
        for text in ["", ":", "bob", "ann:nobody", "5:", "4294967295", "+5", "-1", "ann:users:x", "ann:-1"] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }
}
