//! Changes of a mode as chmod reads them: `755`, `u+rwx,g-w`, `a=rX`, `+t`.
//!
//! The grammar is that of POSIX, with the additions of GNU chmod: `+6000` and `=755`, and that a directory keeps its
//! set-user-id and set-group-id bits unless the change names them.

use ubtrfs_fs::mode;

/// A list of changes, each of which starts with the result of the one before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModeChange(Vec<ModeStep>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ModeStep {
    operator: Operator,
    /// The bits of the users that the step is about. `None` if it names no user; then the bits of the umask stay as
    /// they are.
    affected: Option<u32>,
    value: ModeValue,
    /// The set-id bits that the step also changes for directories.
    set_id_of_dirs: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Set,
    Add,
    Remove,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModeValue {
    Bits(u32),
    /// The bits, and those to execute if the file is a directory or somebody may execute it.
    BitsAndSearch(u32),
    /// The permissions of the users with these bits, for all users.
    CopyOf(u32),
}

impl ModeChange {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("'{text}' is not a mode; write octal digits such as 755, or changes such as u+x,g-w or a=rX");
        let steps = if text.starts_with(|c: char| c.is_ascii_digit()) {
            let bits = octal(text).ok_or_else(wrong)?;
            // With five digits or more, the set-id bits of directories are changed, too.
            let set_id_of_dirs = if text.len() > 4 { SET_ID } else { bits & SET_ID };
            vec![ModeStep {
                operator: Operator::Set,
                affected: Some(ALL),
                value: ModeValue::Bits(bits),
                set_id_of_dirs,
            }]
        } else {
            let mut steps = Vec::new();
            for clause in text.split(',') {
                parse_clause(clause, &mut steps).ok_or_else(wrong)?;
            }
            steps
        };
        Ok(Self(steps))
    }

    /// Returns the permissions of a file with this mode after the change.
    pub(super) fn apply(&self, old: u32, umask: u32) -> u32 {
        let is_dir = old & mode::TYPE == mode::DIRECTORY;
        self.0.iter().fold(old & mode::PERMISSIONS, |bits, step| step.apply(bits, is_dir, umask))
    }
}

impl ModeStep {
    fn apply(self, bits: u32, is_dir: bool, umask: u32) -> u32 {
        let kept = if is_dir { SET_ID & !self.set_id_of_dirs } else { 0 };
        let value = match self.value {
            ModeValue::Bits(value) => value,
            ModeValue::BitsAndSearch(value) if is_dir || bits & EXECUTE != 0 => value | EXECUTE,
            ModeValue::BitsAndSearch(value) => value,
            ModeValue::CopyOf(of) => {
                let bits = bits & of;
                [READ, WRITE, EXECUTE].into_iter().filter(|right| bits & right != 0).sum()
            }
        };
        let value = value & self.affected.unwrap_or(!umask) & !kept;
        match self.operator {
            Operator::Add => bits | value,
            Operator::Remove => bits & !value,
            Operator::Set => bits & (self.affected.map_or(0, |affected| !affected) | kept) | value,
        }
    }
}

/// Parses users, and one operator or more with permissions.
fn parse_clause(clause: &str, steps: &mut Vec<ModeStep>) -> Option<()> {
    let mut rest = clause.trim_start_matches(['u', 'g', 'o', 'a']);
    let users = &clause[..clause.len() - rest.len()];
    let affected = users.chars().fold(None, |bits: Option<u32>, user| Some(bits.unwrap_or(0) | bits_of(user)));
    if rest.is_empty() {
        return None;
    }
    while let Some(first) = rest.chars().next() {
        let operator = match first {
            '=' => Operator::Set,
            '+' => Operator::Add,
            '-' => Operator::Remove,
            _ => return None,
        };
        rest = &rest[1..];
        let permissions = &rest[..rest.find(['=', '+', '-']).unwrap_or(rest.len())];
        rest = &rest[permissions.len()..];
        steps.push(parse_step(operator, affected, permissions)?);
    }
    Some(())
}

fn parse_step(operator: Operator, affected: Option<u32>, permissions: &str) -> Option<ModeStep> {
    if permissions.starts_with(|c: char| c.is_ascii_digit()) {
        let value = ModeValue::Bits(octal(permissions).filter(|_| affected.is_none())?);
        return Some(ModeStep { operator, affected: Some(ALL), value, set_id_of_dirs: SET_ID });
    }
    if let "u" | "g" | "o" = permissions {
        let user = permissions.chars().next()?;
        let value = ModeValue::CopyOf(bits_of(user) & 0o777);
        return Some(ModeStep { operator, affected, value, set_id_of_dirs: 0 });
    }
    let (mut bits, mut searches) = (0, false);
    for letter in permissions.chars() {
        bits |= match letter {
            'r' => READ,
            'w' => WRITE,
            'x' => EXECUTE,
            's' => SET_ID,
            't' => STICKY,
            'X' => {
                searches = true;
                0
            }
            _ => return None,
        };
    }
    let value = if searches { ModeValue::BitsAndSearch(bits) } else { ModeValue::Bits(bits) };
    Some(ModeStep { operator, affected, value, set_id_of_dirs: bits & SET_ID & affected.unwrap_or(ALL) })
}

/// The bits that belong to a user.
fn bits_of(user: char) -> u32 {
    match user {
        'u' => mode::SETUID | 0o700,
        'g' => mode::SETGID | 0o070,
        'o' => STICKY | 0o007,
        _ => ALL,
    }
}

fn octal(text: &str) -> Option<u32> {
    let is_octal = text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
    u32::from_str_radix(text, 8).ok().filter(|bits| is_octal && *bits <= ALL)
}

const ALL: u32 = mode::PERMISSIONS;
const SET_ID: u32 = mode::SETUID | mode::SETGID;
const STICKY: u32 = 0o1000;
const READ: u32 = 0o444;
const WRITE: u32 = 0o222;
const EXECUTE: u32 = 0o111;

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: u32 = mode::REGULAR;
    const DIR: u32 = mode::DIRECTORY;

    fn changed(change: &str, old: u32) -> u32 {
        ModeChange::parse(change).unwrap().apply(old, 0o022)
    }

    #[test]
    fn octal_modes_replace_all_bits() {
        assert_eq!(changed("755", FILE | 0o4600), 0o755);
        assert_eq!(changed("0", FILE | 0o777), 0);
        assert_eq!(changed("6711", FILE), 0o6711);
    }

    #[test]
    fn letters_change_the_bits_of_the_users_before_them() {
        for (change, old, new) in [
            ("u+rwx,g-w", 0o460, 0o740),
            ("a=rX", 0o640, 0o444),
            ("a=rX", 0o740, 0o555),
            ("u+s", 0o755, 0o4755),
            ("+t", 0o755, 0o1755),
            ("g=u", 0o741, 0o771),
            ("o=u-w", 0o750, 0o755),
            ("go=", 0o777, 0o700),
        ] {
            assert_eq!(changed(change, FILE | old), new, "{change}");
        }
    }

    #[test]
    fn without_users_the_umask_protects_its_bits() {
        assert_eq!(changed("+w", FILE | 0o444), 0o644);
        assert_eq!(changed("-w", FILE | 0o666), 0o466);
        assert_eq!(changed("a+w", FILE | 0o444), 0o666);
    }

    #[test]
    fn directories_keep_set_ids_that_are_not_named() {
        assert_eq!(changed("755", DIR | 0o6700), 0o6755);
        assert_eq!(changed("00755", DIR | 0o6700), 0o755);
        assert_eq!(changed("u=rwx,go=rx", DIR | 0o6700), 0o6755);
        assert_eq!(changed("g-s", DIR | 0o6755), 0o4755);
        assert_eq!(changed("-6000", DIR | 0o6755), 0o755);
    }

    #[test]
    fn what_is_no_mode_is_refused() {
        for text in ["", "8", "789", "17777", "u", "u+", "x+u", "u+y", "u+rg", "u+r,", ",u+r", "u+755", "+9", "+\u{e4}"]
        {
            let parsed = ModeChange::parse(text);
            assert_eq!(parsed.is_err(), text != "u+", "{text}");
        }
    }
}
