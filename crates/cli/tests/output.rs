//! What is printed may reach nobody: a full disk, a closed pipe. Every command, with each of its outputs on /dev/full and on
//! a pipe without a reader: an error where a result is lost, never a panic.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_ubtrfs");

/// The names of all commands, from the program's own help; groups with their members.
fn all_commands() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut todo = vec![String::new()];
    while let Some(group) = todo.pop() {
        let help = Command::new(PROGRAM).args(group.split_whitespace()).arg("--help").output().unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        let Some((_, list)) = help.split_once("Commands:\n") else {
            found.insert(group.trim().to_owned());
            continue;
        };
        for line in list.lines().take_while(|line| !line.is_empty()).filter(|line| line.starts_with("  ")) {
            let name = line[2..].split(' ').next().unwrap();
            if !name.is_empty() && name != "help" {
                todo.push(format!("{group} {name}"));
            }
        }
    }
    found
}

/// Runs a command with these outputs.
fn run(line: &str, dir: &Path, stdout: Stdio, stderr: Stdio) -> ExitStatus {
    let command = format!("timeout 60 {PROGRAM} {line}");
    Command::new("sh")
        .args(["-c", &command])
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(stderr)
        .status()
        .unwrap()
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn no_command_panics_where_nobody_reads_what_it_prints() {
    let dir = tempfile::tempdir().unwrap();
    let (work, kept) = (dir.path(), dir.path().join("kept.img"));
    fs::create_dir_all(work.join("root/d")).unwrap();
    fs::write(work.join("root/f"), "content").unwrap();
    fs::write(work.join("root/d/g"), "content").unwrap();
    let made = Command::new(PROGRAM)
        .args(["mkfs", "-q", "-b", "128M", "-r", "root", "kept.img"])
        .current_dir(work)
        .status()
        .unwrap();
    assert!(made.success());
    let exported =
        Command::new(PROGRAM).args(["export", "-f", "a.tar", "kept.img:/"]).current_dir(work).status().unwrap();
    assert!(exported.success());

    // Those that print a result fail when it is lost; `false`: there is none, or none in this case.
    let lines = [
        ("--help", true),
        ("--version", true),
        ("help", true),
        ("help mkfs", true),
        ("subvolume --help", true),
        ("mkfs -b 128M new.img", true),
        ("mkfs --json -b 128M new.img", true),
        ("mkfs -O list-all", true),
        ("mkfs --no-such-option", false),
        ("mount --fake a.img root", false),
        ("mount a.img no-such-directory", false),
        ("umount root", false),
        ("sync root", false),
        ("filesystem sync root", false),
        ("stats a.img", true),
        ("stats --json a.img", true),
        ("stats --prometheus a.img", true),
        ("stats root", false),
        ("check a.img", true),
        ("check --json a.img", true),
        ("import a.tar a.img:/", true),
        ("import --json a.tar a.img:/x", true),
        ("import missing a.img:/", false),
        ("export a.img:/", true),
        ("ls -lR a.img:/", true),
        ("ls --json a.img:/", true),
        ("cat a.img:/f", true),
        ("stat a.img:/f", true),
        ("stat a.img:/missing a.img:/f", true),
        ("cp a.img:/f /proc/self/fd/1", true),
        ("cp a.img:/missing copy", false),
        ("rm a.img:/f", false),
        ("mkdir a.img:/new", false),
        ("subvolume create a.img:/s", true),
        ("subvolume snapshot a.img:/ a.img:/t", true),
        ("subvolume delete a.img:/d", false),
        ("subvolume list a.img", false),
        ("subvolume list --json a.img", true),
        ("subvolume show a.img:/", true),
        ("subvolume get-default a.img", true),
        ("subvolume set-default a.img:/", false),
        ("subvolume set-read-only a.img:/ true", false),
        ("inspect dump-super a.img", true),
        ("inspect dump-super --json a.img", true),
        ("inspect dump-tree a.img", true),
        ("inspect dump-tree --json a.img", true),
        ("inspect dump-tree -t 99 a.img", false),
    ];
    let named: Vec<&str> = lines.iter().map(|(line, _)| *line).collect();
    for command in all_commands() {
        assert!(named.iter().any(|line| line.starts_with(&command)), "add `{command}` to the lines above");
    }
    let renew = |line: &str| {
        let _ = fs::remove_file(work.join("new.img"));
        let changes = ["import", "rm", "mkdir", "subvolume"].iter().any(|command| line.starts_with(command));
        if changes || !work.join("a.img").exists() {
            let args =
                ["--sparse=always".as_ref(), kept.as_os_str(), work.join("a.img").as_os_str()].map(OsStr::to_owned);
            assert!(Command::new("cp").args(args).status().unwrap().success());
        }
    };
    for (line, has_result) in lines {
        for (what, stdout, stderr) in [
            ("full", full as fn() -> Stdio, Stdio::null as fn() -> Stdio),
            ("closed", closed, Stdio::null),
            ("full", Stdio::null, full),
            ("closed", Stdio::null, closed),
            ("full", full, full),
        ] {
            renew(line);
            let status = run(line, work, stdout(), stderr());
            assert!(matches!(status.code(), Some(0..=2)), "{line} ({what}): {status}");
        }
        if has_result {
            renew(line);
            assert!(
                !run(line, work, full(), Stdio::null()).success(),
                "{line}: its result is lost, which is no success"
            );
        }
    }
}
