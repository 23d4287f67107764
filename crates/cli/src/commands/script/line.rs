//! The words of a line, and paths in the image.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use anyhow::bail;

use crate::commands::offline::{join, normal_names};

/// The image that lines work on, and the directory in it where relative paths begin.
#[derive(Clone, Debug)]
pub(super) struct ScriptPlace {
    pub(super) image: PathBuf,
    /// An absolute path.
    pub(super) dir: Vec<u8>,
}

/// The meaning of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// Nothing: the line is empty or a comment.
    Nothing,
    /// Change the directory where relative paths begin, to this absolute path.
    ChangeDir(Vec<u8>),
    /// Run this command line, whose first word is the program's name.
    Command(Vec<OsString>),
}

impl ScriptPlace {
    pub(super) fn new(image: &Path) -> Self {
        Self { image: image.to_owned(), dir: b"/".to_vec() }
    }

    /// Splits a line into words, and replaces `:PATH` by a path in the image.
    pub(super) fn parse(&self, line: &[u8]) -> anyhow::Result<Line> {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            return Ok(Line::Nothing);
        }
        let mut lexer = shlex::bytes::Shlex::new(line);
        let words: Vec<Vec<u8>> = lexer.by_ref().collect();
        if lexer.had_error {
            bail!("the line ends in a quoted text or after a backslash; close the quotes");
        }
        match words.as_slice() {
            [cd] if cd == b"cd" => return Ok(Line::ChangeDir(b"/".to_vec())),
            [cd, dir] if cd == b"cd" => {
                return Ok(Line::ChangeDir(self.absolute(dir.strip_prefix(b":").unwrap_or(dir))));
            }
            [cd, ..] if cd == b"cd" => bail!("cd takes one directory of the image"),
            _ => {}
        }
        let program = std::iter::once(OsString::from("ubtrfs"));
        Ok(Line::Command(program.chain(words.into_iter().map(|word| self.word(word))).collect()))
    }

    /// The absolute path in the image of a path that may be relative.
    pub(super) fn absolute(&self, path: &[u8]) -> Vec<u8> {
        let ends_in_slash = path.ends_with(b"/");
        let full = if path.starts_with(b"/") { path.to_vec() } else { [&self.dir[..], b"/", path].concat() };
        let mut path = join(&normal_names(&full));
        if ends_in_slash && !path.ends_with(b"/") {
            path.push(b'/');
        }
        path
    }

    fn word(&self, word: Vec<u8>) -> OsString {
        match word.strip_prefix(b":") {
            Some(path) => self.path(&self.absolute(path)),
            None => OsString::from_vec(word),
        }
    }

    /// `IMAGE:/path`
    pub(super) fn path(&self, absolute: &[u8]) -> OsString {
        let mut text = self.image.clone().into_os_string();
        text.push(":");
        text.push(OsStr::from_bytes(absolute));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: Line) -> Vec<String> {
        match line {
            Line::Command(words) => words.into_iter().skip(1).map(|word| word.into_string().unwrap()).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_colon_begins_a_path_in_the_image() {
        let mut place = ScriptPlace::new(Path::new("d.img"));
        let parsed = |place: &ScriptPlace, line: &str| words(place.parse(line.as_bytes()).unwrap());
        assert_eq!(parsed(&place, "ls -l :/etc :"), ["ls", "-l", "d.img:/etc", "d.img:/"]);
        assert_eq!(parsed(&place, "cp 'my file' a:b \":x y/\""), ["cp", "my file", "a:b", "d.img:/x y/"]);
        place.dir = b"/usr/lib".to_vec();
        assert_eq!(parsed(&place, "rm :a/./b :../c :/d"), ["rm", "d.img:/usr/lib/a/b", "d.img:/usr/c", "d.img:/d"]);
        assert_eq!(place.parse(b"cd :..").unwrap(), Line::ChangeDir(b"/usr".to_vec()));
        assert_eq!(place.parse(b"cd bin").unwrap(), Line::ChangeDir(b"/usr/lib/bin".to_vec()));
        assert_eq!(place.parse(b"cd").unwrap(), Line::ChangeDir(b"/".to_vec()));
    }

    #[test]
    fn comments_are_skipped_and_open_quotes_refused() {
        let place = ScriptPlace::new(Path::new("d.img"));
        for line in ["", "  \t", "# rm :/a", "   # x"] {
            assert_eq!(place.parse(line.as_bytes()).unwrap(), Line::Nothing, "{line}");
        }
        for line in ["ls 'a", "ls \"a", "ls a\\", "cd a b"] {
            assert!(place.parse(line.as_bytes()).is_err(), "{line}");
        }
    }
}
