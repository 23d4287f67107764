//! The grammar of `btrfs`: groups and commands, which may be shortened as far as they stay unambiguous, and options
//! before them.
//!
//! I1. [`COMMANDS`] has every command of btrfs-progs, in its order. A command that this program does not have is
//!     refused by its full name, with the reason in [`ABSENT`].

use std::ffi::{OsStr, OsString};

use crate::common::Shown;

/// The groups of `btrfs` with their commands. A group without commands is itself a command.
const COMMANDS: &[(&str, &[&str])] = &[
    ("balance", &["start", "pause", "cancel", "resume", "status"]),
    ("check", &[]),
    ("device", &["add", "delete", "remove", "replace", "scan", "ready", "stats", "usage"]),
    ("filesystem", &["df", "du", "show", "sync", "defragment", "balance", "resize", "label", "usage", "mkswapfile"]),
    (
        "inspect-internal",
        &[
            "inode-resolve",
            "logical-resolve",
            "subvolid-resolve",
            "rootid",
            "map-swapfile",
            "min-dev-size",
            "dump-tree",
            "dump-super",
            "tree-stats",
            "list-chunks",
        ],
    ),
    ("property", &["get", "set", "list"]),
    ("qgroup", &["assign", "remove", "create", "clear-stale", "destroy", "show", "limit"]),
    ("quota", &["enable", "disable", "rescan", "status"]),
    ("receive", &[]),
    ("replace", &["start", "status", "cancel"]),
    (
        "rescue",
        &[
            "chunk-recover",
            "super-recover",
            "zero-log",
            "fix-device-size",
            "create-control-device",
            "clear-uuid-tree",
            "clear-space-cache",
            "clear-ino-cache",
            "fix-data-checksum",
        ],
    ),
    ("restore", &[]),
    ("scrub", &["start", "cancel", "resume", "status", "limit"]),
    ("send", &[]),
    ("subvolume", &["create", "delete", "list", "snapshot", "get-default", "set-default", "find-new", "show", "sync"]),
    ("help", &[]),
    ("version", &[]),
];

/// Commands of btrfs-progs that this program does not have, with what to do instead. A name without a command stands
/// for its whole group.
const ABSENT: &[(&str, &str)] = &[
    ("device replace", "a device is replaced by: btrfs replace start DEVICE NEW PATH"),
    ("filesystem mkswapfile", "Linux cannot swap to a file of a FUSE mount; use a file of another filesystem"),
    ("inspect-internal map-swapfile", "Linux cannot swap to a file of a FUSE mount"),
    ("inspect-internal list-chunks", "chunks are listed by: btrfs inspect-internal dump-tree -t chunk DEVICE"),
    ("rescue chunk-recover", "a lost chunk tree cannot be rebuilt"),
    ("rescue zero-log", "a log that cannot be replayed is left out by: mount -o nologreplay,ro"),
    ("rescue fix-device-size", "sizes of devices cannot be repaired"),
    ("rescue create-control-device", "the control device is Linux's; no command of ubtrfs uses it"),
    ("rescue clear-uuid-tree", "the UUID tree cannot be rebuilt"),
    ("rescue clear-space-cache", "a space cache cannot be removed"),
    ("rescue clear-ino-cache", "an inode cache cannot be removed"),
    ("rescue fix-data-checksum", "checksums of data cannot be replaced"),
    ("restore", "files of an image, also of a damaged one, are copied by: ubtrfs cp -r IMAGE:/PATH DIRECTORY"),
];

/// A command line of `btrfs` in parts.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct CommandLine {
    /// Options before the command.
    pub(super) globals: Globals,
    /// Full names of the group and the command.
    pub(super) names: Vec<&'static str>,
    /// Everything after them.
    pub(super) rest: Vec<OsString>,
}

/// The options before the command.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Globals {
    pub(super) format: Option<String>,
    pub(super) verbose: usize,
    pub(super) quiet: bool,
    pub(super) help: bool,
    pub(super) version: bool,
}

/// A mistake in a command line, as the lines of its message. The first line begins with `btrfs`.
pub(super) type Mistake = String;

/// Splits a command line, without the program's name, into options, full names and the rest.
pub(super) fn parse(args: &[OsString]) -> Result<CommandLine, Mistake> {
    let (globals, mut rest) = globals(args)?;
    let mut names = Vec::new();
    let groups: Vec<&'static str> = COMMANDS.iter().map(|(group, _)| *group).collect();
    if let Some((word, after)) = rest.split_first() {
        let group = named("btrfs", &groups, word)?;
        (names, rest) = (vec![group], after);
    }
    let commands = names.first().and_then(|group| COMMANDS.iter().find(|(name, _)| name == group));
    let commands = commands.map_or(&[][..], |(_, commands)| commands);
    if let (Some((word, after)), false) = (rest.split_first(), commands.is_empty())
        && word != "--help"
    {
        match named(&format!("btrfs {}", names.join(" ")), commands, word) {
            // The oldest form, which btrfs-progs still takes: `btrfs balance PATH`.
            Err(_) if names == ["balance"] && after.is_empty() => {
                let rest = vec!["--full-balance".into(), word.clone()];
                return Ok(CommandLine { globals, names: vec!["balance", "start"], rest });
            }
            name => names.push(name?),
        }
        rest = after;
    }
    Ok(CommandLine { globals, names, rest: rest.to_vec() })
}

/// Whether this group needs the name of a command.
pub(super) fn is_group(names: &[&str]) -> bool {
    matches!(names, [group] if COMMANDS.iter().any(|(name, commands)| name == group && !commands.is_empty()))
}

/// The reason why this program does not have a command of btrfs-progs.
pub(super) fn absent(names: &[&str]) -> Option<&'static str> {
    let full = names.join(" ");
    ABSENT.iter().find(|(name, _)| *name == full || names.first() == Some(name)).map(|(_, reason)| *reason)
}

/// The usage of a group: its commands.
pub(super) fn usage(names: &[&str]) -> String {
    let group = names.join(" ");
    format!("usage: btrfs {group} <command> <args>\n\n{}", lines_of(&group))
}

/// The commands of all groups.
pub(super) fn overview() -> String {
    COMMANDS.iter().map(|(group, _)| lines_of(group) + "\n").collect()
}

/// A line for each command of a group: its name, and what it does or why it is absent.
fn lines_of(group: &str) -> String {
    let commands = COMMANDS.iter().find(|(name, _)| *name == group).map_or(&[][..], |(_, commands)| commands);
    let all: Vec<Vec<&str>> = match commands {
        [] => vec![vec![group]],
        commands => commands.iter().map(|command| vec![group, command]).collect(),
    };
    let line = |names: &Vec<&str>| {
        let text = match (absent(names), crate::about(names)) {
            (Some(reason), _) => format!("not in ubtrfs: {reason}"),
            (None, Some(about)) => about,
            (None, None) => String::new(),
        };
        format!("    btrfs {}\n        {text}\n", names.join(" "))
    };
    all.iter().map(line).collect()
}

/// Takes the options before the command.
fn globals(mut args: &[OsString]) -> Result<(Globals, &[OsString]), Mistake> {
    let mut globals = Globals::default();
    while let [first, rest @ ..] = args {
        let Some(word) = first.to_str().filter(|word| word.starts_with('-') && word.len() > 1) else { break };
        let (name, joined) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word, None),
        };
        let mut after = rest;
        let mut value = || match (&joined, rest) {
            (Some(value), _) => Ok(value.clone()),
            (None, [value, others @ ..]) => {
                after = others;
                Ok(value.shown())
            }
            (None, []) => Err(format!("btrfs: option '{name}' requires an argument")),
        };
        match name {
            "--format" => globals.format = Some(value()?),
            "--log" => {
                let level = value()?;
                match level.as_str() {
                    "quiet" => globals.quiet = true,
                    "verbose" | "info" => globals.verbose += 1,
                    "debug" => globals.verbose += 3,
                    "default" => {}
                    _ => {
                        return Err(format!(
                            "btrfs: unknown log level '{level}'; give one of: default, info, verbose, debug, quiet"
                        ));
                    }
                }
            }
            "--verbose" => globals.verbose += 1,
            "--quiet" => globals.quiet = true,
            "--help" => globals.help = true,
            "--version" => globals.version = true,
            flags if !flags.starts_with("--") => {
                for letter in flags.chars().skip(1) {
                    match letter {
                        'v' => globals.verbose += 1,
                        'q' => globals.quiet = true,
                        _ => return Err(format!("Unknown global option: -{letter}")),
                    }
                }
            }
            _ => return Err(format!("Unknown global option: {word}")),
        }
        args = after;
    }
    Ok((globals, args))
}

/// The only one of these names that begins with this word, or the one that equals it.
fn named(of: &str, names: &[&'static str], word: &OsStr) -> Result<&'static str, Mistake> {
    let shown = word.shown();
    let word = word.to_str().unwrap_or_default();
    if let Some(name) = names.iter().find(|name| **name == word) {
        return Ok(name);
    }
    let near: Vec<&'static str> =
        names.iter().copied().filter(|name| !word.is_empty() && name.starts_with(word)).collect();
    match near.as_slice() {
        [name] => Ok(name),
        [] => Err(format!("{of}: unknown token '{shown}'")),
        _ => {
            Err(format!("{of}: ambiguous token '{shown}'\n\nDid you mean one of these ?\n    {}", near.join("\n    ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Result<CommandLine, Mistake> {
        parse(&text.split_whitespace().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn names_may_be_shortened_as_far_as_they_are_unambiguous() {
        let names = |text: &str| line(text).map(|line| line.names.join(" "));
        assert_eq!(names("su li /m"), Ok("subvolume list".to_owned()));
        assert_eq!(names("fi df /m"), Ok("filesystem df".to_owned()));
        assert_eq!(names("i dump-t /d"), Ok("inspect-internal dump-tree".to_owned()));
        assert_eq!(names("dev st /m"), Ok("device stats".to_owned()));
        assert_eq!(names("fi us --help"), Ok("filesystem usage".to_owned()));
        assert_eq!(names("subvolume --help"), Ok("subvolume".to_owned()));
        assert_eq!(
            line("fi s").unwrap_err(),
            "btrfs filesystem: ambiguous token 's'\n\nDid you mean one of these ?\n    show\n    sync"
        );
        assert_eq!(line("balance /m").unwrap(), line("balance start --full-balance /m").unwrap());
        assert_eq!(line("foo").unwrap_err(), "btrfs: unknown token 'foo'");
        assert_eq!(line("sub x").unwrap_err(), "btrfs subvolume: unknown token 'x'");
    }

    #[test]
    fn options_stand_before_the_command() {
        let parsed = line("-vq --format json --log=debug fi df -b /m").unwrap();
        let globals = Globals { format: Some("json".to_owned()), verbose: 4, quiet: true, ..Globals::default() };
        assert_eq!(parsed.globals, globals);
        assert_eq!((parsed.names.join(" "), parsed.rest.len()), ("filesystem df".to_owned(), 2));
        assert_eq!(line("--format").unwrap_err(), "btrfs: option '--format' requires an argument");
        assert_eq!(line("-x fi").unwrap_err(), "Unknown global option: -x");
    }

    #[test]
    fn every_absent_command_is_a_command_of_btrfs_progs() {
        for (full, _) in ABSENT {
            let parsed = line(full).unwrap();
            assert_eq!((parsed.names.join(" ").as_str(), parsed.rest.len()), (*full, 0));
        }
        assert!(absent(&["restore"]).is_some() && absent(&["replace", "start"]).is_none());
    }
}
