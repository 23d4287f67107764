//! Patterns in the paths of images: `*`, `?` and `[...]`, as in a shell.
//!
//! Names are bytes. `?` and `[...]` stand for one character of UTF-8, or for one byte that is not UTF-8.
//!
//! Invariants:
//! - I1. A name that exists literally is not a pattern: `a*` means the file `a*` if there is one. On the way to a file,
//!   it must be a directory.
//! - I2. A pattern matches names of one directory. `*` matches no slash, and no dot at the start of a name.
//! - I3. A path with patterns that leads to no file is an error.

use anyhow::{Context, bail};
use ubtrfs_fs::{Error, Fs};

use super::{ImagePath, child_path, read_names};

/// Whether a path or name has characters of a pattern.
pub(super) fn is_pattern(path: &[u8]) -> bool {
    path.iter().any(|byte| b"*?[".contains(byte))
}

/// Returns the paths that a path with patterns leads to, in the order of their names. A path without patterns is
/// returned as it is, even if it leads to no file.
pub(super) fn expand(fs: &Fs, at: &ImagePath) -> anyhow::Result<Vec<ImagePath>> {
    if !is_pattern(&at.path) || !is_absent(&fs.lookup_path(&at.path, false)) {
        return Ok(vec![at.clone()]);
    }
    let mut found = vec![b"/".to_vec()];
    let mut is_certain = true;
    let mut names = at.path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).peekable();
    while let Some(name) = names.next() {
        let may_be_file = names.peek().is_none() && !at.path.ends_with(b"/");
        let mut next = Vec::new();
        for dir in found {
            match is_pattern(name) {
                true => add_matches(fs, &dir, (name, may_be_file), &mut next).with_context(|| at.to_string())?,
                false => next.push(child_path(&dir, name)),
            }
            if next.len() > MAX_MATCHES {
                bail!("more than {MAX_MATCHES} names match {at}; choose a pattern that matches less");
            }
        }
        is_certain &= !is_pattern(name);
        if !is_certain {
            next.retain(|path| !is_absent(&fs.lookup_path(path, false)));
        }
        found = next;
    }
    if at.path.ends_with(b"/") {
        found.iter_mut().for_each(|path| path.push(b'/'));
        found.retain(|path| !is_absent(&fs.lookup_path(path, true)));
    }
    if found.is_empty() {
        return Err(Error::NotFound).with_context(|| format!("no name matches {at}"));
    }
    Ok(found.into_iter().map(|path| ImagePath { image: at.image.clone(), path }).collect())
}

/// Whether a lookup found out that there is no such file. The work on the file reports any other failure.
fn is_absent<T>(found: &ubtrfs_fs::Result<T>) -> bool {
    matches!(found, Err(Error::NotFound | Error::NotDirectory))
}

/// Adds the paths of the names in a directory that match (I1, I2). A path that leads to no directory adds nothing.
fn add_matches(
    fs: &Fs,
    dir: &[u8],
    (pattern, may_be_file): (&[u8], bool),
    found: &mut Vec<Vec<u8>>,
) -> ubtrfs_fs::Result<()> {
    let attr = match fs.lookup_path(dir, true) {
        Ok(attr) if attr.is_dir() => attr,
        Ok(_) | Err(Error::NotFound | Error::NotDirectory) => return Ok(()),
        Err(error) => return Err(error),
    };
    let literal = child_path(dir, pattern);
    if fs.lookup_path(&literal, !may_be_file).is_ok_and(|attr| may_be_file || attr.is_dir()) {
        found.push(literal);
        return Ok(());
    }
    let is_hidden = |name: &[u8]| name.starts_with(b".") && !pattern.starts_with(b".");
    let names = read_names(fs, attr.id)?.into_iter().map(|entry| entry.name);
    found.extend(names.filter(|name| !is_hidden(name) && matches(pattern, name)).map(|name| child_path(dir, &name)));
    Ok(())
}

/// Whether a name matches a pattern as a whole. Takes at most as many steps as the product of their lengths.
pub(super) fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut pattern, mut name) = (pattern, name);
    // The pattern after the last `*`, and the rest of the name with which it is tried next.
    let mut retry: Option<(&[u8], &[u8])> = None;
    loop {
        if let [b'*', after @ ..] = pattern {
            (pattern, retry) = (after, Some((after, name)));
            continue;
        }
        let step = first_char(name).and_then(|(c, rest)| Some((match_one(pattern, c)?, rest)));
        if let Some(next) = step {
            (pattern, name) = next;
        } else if pattern.is_empty() && name.is_empty() {
            return true;
        } else {
            let Some((after, (_, rest))) = retry.and_then(|(after, from)| Some((after, first_char(from)?))) else {
                return false;
            };
            (pattern, name, retry) = (after, rest, Some((after, rest)));
        }
    }
}

/// Matches a character with the start of a pattern other than `*`. Returns the rest of the pattern.
fn match_one(pattern: &[u8], c: u32) -> Option<&[u8]> {
    match pattern {
        [b'?', rest @ ..] => Some(rest),
        [b'[', inner @ ..] => match Set::parse(inner) {
            Some((set, rest)) => set.contains(c).then_some(rest),
            // A bracket that is not closed stands for itself.
            None => (c == u32::from(b'[')).then_some(inner),
        },
        _ => first_char(pattern).and_then(|(own, rest)| (own == c).then_some(rest)),
    }
}

/// The characters in brackets.
struct Set {
    is_negated: bool,
    ranges: Vec<(u32, u32)>,
}

impl Set {
    /// Parses what follows an opening bracket. Returns the rest of the pattern, too. A closing bracket at the start is
    /// a member. `None` if no bracket closes the set.
    fn parse(text: &[u8]) -> Option<(Self, &[u8])> {
        let (is_negated, mut rest) = match text {
            [b'!' | b'^', rest @ ..] => (true, rest),
            _ => (false, text),
        };
        let mut ranges = Vec::new();
        loop {
            if let ([b']', after @ ..], false) = (rest, ranges.is_empty()) {
                return Some((Self { is_negated, ranges }, after));
            }
            let (low, after) = first_char(rest)?;
            rest = after;
            let mut high = low;
            if let [b'-', after @ ..] = rest
                && !after.starts_with(b"]")
            {
                (high, rest) = first_char(after)?;
            }
            ranges.push((low, high));
        }
    }

    fn contains(&self, c: u32) -> bool {
        self.ranges.iter().any(|(low, high)| (*low..=*high).contains(&c)) != self.is_negated
    }
}

/// Splits off the first character. A byte that is not UTF-8 gets a number above those of characters.
fn first_char(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let first = *bytes.first()?;
    let len = match first {
        0xc2..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xf4 => 4,
        _ => 1,
    };
    let c = bytes.get(..len).and_then(|bytes| std::str::from_utf8(bytes).ok()?.chars().next());
    Some(match c {
        Some(c) => (u32::from(c), &bytes[len..]),
        None => (NOT_A_CHAR + u32::from(first), &bytes[1..]),
    })
}

/// More than the number of any character.
const NOT_A_CHAR: u32 = 0x11_0000;

/// The most paths that one path with patterns may lead to. In a crafted image, a directory may be inside of itself, so
/// several patterns in a path could match without an end.
const MAX_MATCHES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn does_match(pattern: &str, name: &str) -> bool {
        matches(pattern.as_bytes(), name.as_bytes())
    }

    #[test]
    fn stars_and_question_marks_match_as_in_a_shell() {
        for (pattern, name) in [
            ("*", ""),
            ("*", "a.conf"),
            ("*.conf", "a.b.conf"),
            ("a*b*c", "a-b-b-c"),
            ("?", "x"),
            ("?", "\u{e4}"),
            ("a?c", "abc"),
            ("**", "x"),
            ("", ""),
            ("[", "["),
            ("[ab", "[ab"),
        ] {
            assert!(does_match(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("*.conf", "a.cnf"), ("?", ""), ("?", "ab"), ("a", ""), ("", "a"), ("a*b", "a-b-c")] {
            assert!(!does_match(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn brackets_hold_characters_ranges_and_negations() {
        for (pattern, yes, no) in [
            ("[abc]", "b", "d"),
            ("[a-c]x", "cx", "dx"),
            ("[!a-c]", "d", "a"),
            ("[^a]", "b", "a"),
            ("[]]", "]", "["),
            ("[!]]", "[", "]"),
            ("[a-]", "-", "b"),
            ("[*]", "*", "x"),
            ("[\u{e0}-\u{ff}]", "\u{e4}", "a"),
        ] {
            assert!(does_match(pattern, yes) && !does_match(pattern, no), "{pattern}");
        }
    }

    #[test]
    fn bytes_that_are_not_utf8_are_characters_of_their_own() {
        assert!(matches(b"a?b", b"a\xffb") && !matches(b"a?b", b"a\xff\xfeb"));
        assert!(matches(b"[\xf0-\xff]", b"\xfe") && !matches(b"[\xf0-\xff]", b"\xc3\xbe"));
        assert!(matches(b"\xff*", b"\xffx") && !matches(b"\xff*", b"x"));
    }

    #[test]
    fn many_stars_take_few_steps() {
        let pattern = "*a".repeat(120) + "b";
        assert!(!does_match(&pattern, &"a".repeat(255)));
    }
}
