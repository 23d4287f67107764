//! Patterns of names: `*`, `?` and `[...]`, as in a shell.
//!
//! Names are bytes. `?` and `[...]` stand for one character of UTF-8, or for one byte that is not UTF-8.

/// Whether a name matches a pattern as a whole. Takes at most as many steps as the product of their lengths.
pub fn matches(pattern: &[u8], name: &[u8]) -> bool {
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
