//! The completions of the prompt: names of commands and options, paths in the image, and paths of the host.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use rustyline::completion::{Completer, Pair, Quote, escape, extract_word, unescape};
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::validate::Validator;
use rustyline::{Context, Helper};

use super::line::ScriptPlace;
use crate::commands::offline::{ImageOptions, ImagePath, ImageUse, lookup, read_names, with_image};
use crate::named_command;

/// The completions of a line whose relative paths begin at this place.
pub(super) struct Completions {
    place: ScriptPlace,
}

/// The name of a file, and whether it is a directory.
type Name = (Vec<u8>, bool);

impl Completions {
    pub(super) fn new(place: ScriptPlace) -> Self {
        Self { place }
    }

    /// The completions of a word that follows these words.
    fn of_word(&self, before: &[&str], word: &str) -> Vec<String> {
        if let Some(path) = word.strip_prefix(':') {
            return like(path, &self.names_in_image(directory(path))).map(|found| format!(":{found}")).collect();
        }
        let args: Vec<OsString> = std::iter::once("ubtrfs").chain(before.iter().copied()).map(OsString::from).collect();
        let (names, command) = named_command(&args);
        let mut found: Vec<String> = Vec::new();
        // A command's name, if all words before are names of commands.
        if names.len() == args.len() {
            found.extend(
                command.get_subcommands().filter(|sub| !sub.is_hide_set()).map(|sub| sub.get_name().to_owned()),
            );
            if before.is_empty() {
                found.extend(["cd", "exit"].map(str::to_owned));
            }
        }
        if word.starts_with('-') {
            found.extend(command.get_opts().filter_map(|option| Some(format!("--{}", option.get_long()?))));
        }
        found.retain(|name| name.starts_with(word));
        if found.is_empty() {
            found.extend(like(word, &names_of_host(directory(word))));
        }
        found
    }

    /// The names in a directory of the image; none if the image cannot be read, because the command will tell why.
    fn names_in_image(&self, dir: &str) -> Vec<Name> {
        let at = ImagePath { image: self.place.image.clone(), path: self.place.absolute(dir.as_bytes()) };
        let listed = with_image(&at.image, &ImageOptions::default(), ImageUse::Read, |fs| {
            let dir = lookup(fs, &at, true)?;
            let names = read_names(fs, dir.id)?;
            Ok(names.into_iter().map(|name| (name.name, fs.getattr(name.id).is_ok_and(|attr| attr.is_dir()))).collect())
        });
        listed.unwrap_or_default()
    }
}

fn names_of_host(dir: &str) -> Vec<Name> {
    let dir = Path::new(if dir.is_empty() { "." } else { dir });
    let listed = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let name =
        |entry: std::fs::DirEntry| (entry.file_name().into_vec(), entry.file_type().is_ok_and(|kind| kind.is_dir()));
    listed.map(name).collect()
}

/// The part of a path up to its last slash.
fn directory(path: &str) -> &str {
    path.rfind('/').and_then(|at| path.get(..=at)).unwrap_or_default()
}

/// The paths of the names that begin like the path. Leaves out names that a terminal would not show as they are.
fn like<'n>(path: &'n str, names: &'n [Name]) -> impl Iterator<Item = String> + use<'n> {
    let dir = directory(path);
    let last = path.strip_prefix(dir).unwrap_or_default();
    names.iter().filter_map(move |(name, is_dir)| {
        let name = std::str::from_utf8(name).ok().filter(|name| !name.contains(char::is_control))?;
        name.starts_with(last).then(|| format!("{dir}{name}{}", if *is_dir { "/" } else { "" }))
    })
}

impl Completer for Completions {
    type Candidate = Pair;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let (start, word) = extract_word(line, pos, Some('\\'), is_break);
        let before: Vec<&str> = line.get(..start).unwrap_or_default().split_whitespace().collect();
        let mut found = self.of_word(&before, &unescape(word, Some('\\')));
        found.sort_unstable();
        let pair = |text: String| {
            let end = if text.ends_with('/') { "" } else { " " };
            let replacement = escape(text.clone(), Some('\\'), is_special, Quote::None) + end;
            Pair { display: text, replacement }
        };
        Ok((start, found.into_iter().map(pair).collect()))
    }
}

/// Whether a character ends a word.
fn is_break(char: char) -> bool {
    char.is_ascii_whitespace()
}

/// Whether a character of a name needs a backslash.
fn is_special(char: char) -> bool {
    is_break(char) || matches!(char, '\\' | '\'' | '"' | '#')
}

impl Hinter for Completions {
    type Hint = String;
}

impl Highlighter for Completions {}

impl Validator for Completions {}

impl Helper for Completions {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_completed_by_their_place_in_the_line() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("d.img");
        let run = |words: &[&str]| {
            let args: Vec<OsString> =
                std::iter::once("ubtrfs").chain(words.iter().copied()).map(OsString::from).collect();
            assert_eq!(crate::run_line(&args).unwrap(), std::process::ExitCode::SUCCESS);
        };
        let shown = image.to_str().unwrap();
        run(&["mkfs", "-q", "-b", "128M", shown]);
        run(&["mkdir", "-p", &format!("{shown}:/etc/my dir"), &format!("{shown}:/etc/\u{1b}[2J")]);
        let completions = Completions::new(ScriptPlace::new(&image));
        assert_eq!(completions.of_word(&[], "mkd"), ["mkdir"]);
        assert_eq!(completions.of_word(&["subvolume"], "li"), ["list"]);
        assert_eq!(completions.of_word(&["mkdir"], "--par"), ["--parents"]);
        assert_eq!(completions.of_word(&["ls"], ":e"), [":etc/"]);
        assert_eq!(completions.of_word(&["ls"], ":etc/"), [":etc/my dir/"], "no control characters");
        let host = format!("{}/d.", dir.path().to_str().unwrap());
        assert_eq!(completions.of_word(&["cp"], &host), [shown]);
    }
}
