//! [`StreamPath`]: a path of a stream, split into names that a receiver can look up one by one.
//!
//! - I1. No name is empty, is `.` or `..`, is longer than 255 bytes, or contains a slash or a zero byte. So a walk that
//!   looks up one name after the other, and follows no symbolic link, never leaves the directory where it starts.

use std::fmt;

/// Maximum length of a path: Linux's `PATH_MAX` without its zero byte.
pub(crate) const PATH_BYTES_MAX: usize = 4095;
/// Maximum length of a name.
const NAME_BYTES_MAX: usize = 255;

/// A checked relative path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPath<'a>(&'a [u8]);

impl<'a> StreamPath<'a> {
    /// Checks a path. The empty path is the directory where the walk starts.
    pub fn new(path: &'a [u8]) -> Result<Self, PathProblem> {
        let problem = |reason| Err(PathProblem { path: path.to_vec(), reason });
        if path.len() > PATH_BYTES_MAX {
            return problem("is longer than 4095 bytes");
        }
        if path.first() == Some(&b'/') {
            return problem("is absolute");
        }
        if path.contains(&0) {
            return problem("contains a zero byte");
        }
        for name in path.split(|&byte| byte == b'/') {
            match name {
                b"" if !path.is_empty() => return problem("contains an empty name"),
                b".." => return problem("contains '..'"),
                b"." => return problem("contains '.'"),
                _ if name.len() > NAME_BYTES_MAX => return problem("contains a name longer than 255 bytes"),
                _ => {}
            }
        }
        Ok(Self(path))
    }

    /// The names in the path, in order.
    pub fn names(self) -> impl DoubleEndedIterator<Item = &'a [u8]> {
        self.0.split(|&byte| byte == b'/').filter(|name| !name.is_empty())
    }

    /// Splits the path into the path of the directory and the last name; `None` for the empty path.
    pub fn split(self) -> Option<(Self, &'a [u8])> {
        if self.0.is_empty() {
            return None;
        }
        let slash = self.0.iter().rposition(|&byte| byte == b'/');
        let (dir, name) = match slash.and_then(|at| self.0.split_at_checked(at)) {
            Some((dir, name)) => (dir, name.get(1..)?),
            None => (&[][..], self.0),
        };
        Some((Self(dir), name))
    }

    /// The bytes.
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }
}

/// A path that must not be followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathProblem {
    /// The path.
    pub path: Vec<u8>,
    /// The reason to refuse the path, as a phrase: "contains '..'".
    pub reason: &'static str,
}

impl fmt::Display for PathProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.path.get(..200).unwrap_or(&self.path);
        write!(f, "the path '{}' {}", shown.escape_ascii(), self.reason)
    }
}

impl std::error::Error for PathProblem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_never_leaves_the_directory() {
        for bad in ["/", "/etc", "..", "a/..", "../a", "a/../b", ".", "a/./b", "a\0b", "a//b", "a/", &"x".repeat(256)] {
            assert!(StreamPath::new(bad.as_bytes()).is_err(), "{bad:?}");
        }
        assert!(StreamPath::new(&b"x/".repeat(2100)).is_err());
    }

    #[test]
    fn a_path_is_split_into_names() {
        let names = |path: &'static str| StreamPath::new(path.as_bytes()).unwrap().names().collect::<Vec<_>>();
        assert_eq!(names(""), [b""; 0]);
        assert_eq!(names("a"), [b"a"]);
        assert_eq!(names("a/b"), [b"a", b"b"]);
        assert_eq!(names("...")[0], b"...");
        let split = |path: &'static str| StreamPath::new(path.as_bytes()).unwrap().split();
        assert_eq!(split(""), None);
        assert_eq!(split("a").unwrap().1, b"a");
        let (dir, name) = split("a/b/c").unwrap();
        assert_eq!((dir.as_bytes(), name), (&b"a/b"[..], &b"c"[..]));
    }
}
