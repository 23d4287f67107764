//! Tests of lost output: a full disk, a pipe without a reader, a closed descriptor. Each command runs once for each of
//! its outputs and each way to lose that output. A command whose output cannot be written exits with an error and does
//! not panic, and the change that the command made is kept.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_ubtrfs");

/// The destination of an output.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sink {
    Null,
    Pipe,
    /// A device that is always full.
    Full,
    /// A pipe without a reader.
    NoReader,
    Closed,
}

/// Runs a command with these outputs. The result contains the outputs that go to `Pipe`.
fn run(line: &str, dir: &Path, stdout: Sink, stderr: Sink) -> Output {
    let close = |sink: Sink, number: u32| if sink == Sink::Closed { format!(" {number}>&-") } else { String::new() };
    let command = format!("exec timeout 60 {PROGRAM} {line}{}{}", close(stdout, 1), close(stderr, 2));
    let open = |sink: Sink| match sink {
        Sink::Null | Sink::Closed => Stdio::null(),
        Sink::Pipe => Stdio::piped(),
        Sink::Full => File::options().write(true).open(full_device(dir)).unwrap().into(),
        Sink::NoReader => {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            writer.into()
        }
    };
    let mut shell = Command::new("sh");
    shell.args(["-c", &command]).current_dir(dir).stdin(Stdio::null()).stdout(open(stdout)).stderr(open(stderr));
    shell.spawn().unwrap().wait_with_output().unwrap()
}

/// Makes a device node for the test, so that a command that removes its target does not hit the machine's node. Without
/// the right to make device nodes, the machine's node is used: a user without this right cannot remove that node
/// either.
fn full_device(dir: &Path) -> PathBuf {
    let own = dir.join("full");
    if !own.exists() {
        let _ = Command::new("mknod").arg(&own).args(["c", "1", "7"]).status().unwrap();
    }
    let opens = File::options().write(true).open(&own).is_ok();
    if opens { own } else { PathBuf::from("/dev/full") }
}

/// Command lines. The second value tells whether the command prints a result, so that it must fail if stdout is lost.
const LINES: [(&str, bool); 134] = [
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
    ("top root", false),
    ("check a.img", true),
    ("check --json a.img", true),
    ("rescue super-recover a.img", true),
    ("rescue super-recover -v a.img", true),
    ("tune -m a.img", false),
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
    ("mv a.img:/f a.img:/d", false),
    ("ln -s text a.img:/new", false),
    ("touch a.img:/new", false),
    ("truncate -s 5 a.img:/f", false),
    ("chmod -R g+w a.img:/", false),
    ("chown -R 5 a.img:/", false),
    ("setfattr -n user.a -v v a.img:/f", false),
    ("getfattr -m - a.img:/d", false),
    ("getfattr --json a.img:/f", true),
    ("find a.img", true),
    ("find --json a.img:/ --type f", true),
    ("find --print0 a.img:/missing a.img:/d", true),
    ("diff a.img:/ a.img:/d", true),
    ("edit a.img script", true),
    ("edit a.img no-script", false),
    ("shell a.img", false),
    ("diff --json a.img:/ a.img:/d", true),
    ("subvolume create a.img:/s", true),
    ("subvolume snapshot a.img:/ a.img:/t", true),
    ("subvolume delete a.img:/d", false),
    ("subvolume list a.img", false),
    ("subvolume list --json a.img", true),
    ("subvolume show a.img:/", true),
    ("subvolume get-default a.img", true),
    ("subvolume set-default a.img:/", false),
    ("subvolume set-read-only a.img:/ true", false),
    ("subvolume sync a.img", false),
    ("device add missing.img a.img", false),
    ("device remove cancel a.img", false),
    ("replace start 1 missing.img a.img", false),
    ("replace status a.img", true),
    ("replace status --json a.img", true),
    ("replace cancel a.img", false),
    ("device stats a.img", true),
    ("device usage a.img", true),
    ("device ready a.img", false),
    ("device scan a.img", true),
    ("balance start a.img", true),
    ("balance status a.img", true),
    ("balance pause a.img", false),
    ("balance resume a.img", false),
    ("balance cancel a.img", false),
    ("scrub start -B a.img", true),
    ("scrub start --json a.img", true),
    ("scrub resume a.img", true),
    ("scrub status -d a.img", true),
    ("scrub status --json a.img", true),
    ("scrub limit a.img", true),
    ("scrub cancel a.img", false),
    ("filesystem df a.img", true),
    ("filesystem usage a.img", true),
    ("filesystem show a.img", true),
    ("filesystem label a.img", true),
    ("filesystem du a.img:/", true),
    ("filesystem trim root", false),
    ("send a.img:/d", false),
    ("receive a.img", false),
    ("push pushed.img:/r file://$PWD/store", true),
    ("pull file://$PWD/store latest pushed.img", true),
    ("remote list file://$PWD/store", true),
    ("remote list --json file://$PWD/store", true),
    ("remote verify file://$PWD/store", true),
    ("remote prune --keep-last 1 file://$PWD/store", true),
    ("subvolume find-new a.img:/ 1", true),
    ("filesystem resize max a.img", true),
    ("filesystem defragment --json a.img:/f", true),
    ("filesystem fiemap a.img:/f", true),
    ("filesystem clone a.img:/f a.img:/d/g", false),
    ("filesystem dedupe a.img:/f a.img:/d/g", false),
    ("property list a.img:/f", true),
    ("property get a.img:/ ro", true),
    ("property set a.img:/f compression zstd", false),
    ("quota enable a.img", false),
    ("quota disable a.img", false),
    ("quota rescan a.img", false),
    ("quota status a.img", true),
    ("qgroup show a.img", false),
    ("qgroup create 1/1 a.img", false),
    ("qgroup destroy 1/1 a.img", false),
    ("qgroup assign 0/5 1/1 a.img", false),
    ("qgroup remove 0/5 1/1 a.img", false),
    ("qgroup limit 1G a.img:/", false),
    ("qgroup clear-stale a.img", false),
    ("inspect logical-resolve 1 a.img", false),
    ("inspect inode-resolve 257 a.img", true),
    ("inspect subvolid-resolve 5 a.img", true),
    ("inspect rootid a.img:/f", true),
    ("inspect min-dev-size a.img", true),
    ("inspect tree-stats a.img", true),
    ("inspect map a.img", true),
    ("inspect map --json a.img", true),
    ("inspect map --svg - a.img", true),
    ("inspect dump-super a.img", true),
    ("inspect dump-super --json a.img", true),
    ("inspect dump-tree a.img", true),
    ("inspect dump-tree --json a.img", true),
    ("inspect dump-tree -t 99 a.img", true),
];

/// A directory with the files that the command lines name.
struct Bed(tempfile::TempDir);

impl Bed {
    fn new() -> Self {
        let bed = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(bed.dir().join("root/d")).unwrap();
        fs::write(bed.dir().join("root/f"), "content").unwrap();
        fs::write(bed.dir().join("root/d/g"), "content").unwrap();
        fs::write(bed.dir().join("script"), "ls :/\n").unwrap();
        let store = format!("file://{}/store", bed.dir().display());
        for args in [
            &["mkfs", "-q", "-b", "128M", "-r", "root", "kept.img"][..],
            &["export", "-f", "a.tar", "kept.img:/"],
            &["mkfs", "-q", "-b", "128M", "pushed.img"],
            &["subvolume", "snapshot", "-r", "pushed.img:/", "pushed.img:/r"],
            &["push", "-q", "pushed.img:/r", &store],
        ] {
            assert!(Command::new(PROGRAM).args(args).current_dir(bed.dir()).status().unwrap().success());
        }
        bed
    }

    fn dir(&self) -> &Path {
        self.0.path()
    }

    /// Runs a command line. Before a command that changes names, restores `a.img` to its first state.
    fn run(&self, line: &str, stdout: Sink, stderr: Sink) -> Output {
        let _ = fs::remove_file(self.dir().join("new.img"));
        let changes =
            ["import", "rm", "mkdir", "mv", "ln", "touch", "subvolume"].iter().any(|command| line.starts_with(command));
        if changes || !self.dir().join("a.img").exists() {
            let copy = ["--sparse=always", "kept.img", "a.img"];
            assert!(Command::new("cp").args(copy).current_dir(self.dir()).status().unwrap().success());
        }
        run(line, self.dir(), stdout, stderr)
    }
}

#[test]
fn the_command_lines_cover_every_command() {
    for command in crate::common::all_commands() {
        assert!(LINES.iter().any(|(line, _)| line.starts_with(&command)), "add `{command}` to LINES");
    }
}

#[test]
fn no_command_panics_when_its_output_is_lost() {
    let bed = Bed::new();
    let sinks = [Sink::Null, Sink::Full, Sink::NoReader, Sink::Closed];
    for (line, _) in LINES {
        for (stdout, stderr) in sinks.into_iter().flat_map(|out| sinks.map(|err| (out, err))) {
            if stdout != Sink::Null && stderr != Sink::Null && stdout != stderr {
                continue;
            }
            let code = bed.run(line, stdout, stderr).status.code();
            assert!(matches!(code, Some(0..=2 | 141)), "{line} ({stdout:?}, {stderr:?}): {code:?}");
        }
    }
}

#[test]
fn a_command_whose_result_is_lost_fails() {
    let bed = Bed::new();
    for (line, has_result) in LINES {
        let usual = bed.run(line, Sink::Null, Sink::Null).status.code();
        for lost in [Sink::Full, Sink::NoReader, Sink::Closed] {
            let output = bed.run(line, lost, Sink::Pipe);
            let (code, stderr) = (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned());
            if !has_result {
                assert_eq!(code, usual, "{line} ({lost:?}) loses nothing");
                continue;
            }
            assert_ne!(code, Some(0), "{line} ({lost:?}): its result is lost, which is no success");
            // The message is not checked for commands that copy to a named file, or that also fail for another reason.
            if ["/proc/self/fd/1", "missing", "-t 99", "edit"].iter().any(|part| line.contains(part)) {
                continue;
            }
            match lost {
                Sink::NoReader => assert_eq!((code, stderr.as_str()), (Some(141), ""), "{line}"),
                _ => assert!(stderr.lines().count() == 1 && stderr.contains("standard output"), "{line}: {stderr}"),
            }
        }
    }
}

#[test]
fn lost_lines_about_streams_are_reported_like_others() {
    let bed = Bed::new();
    fs::copy(bed.dir().join("kept.img"), bed.dir().join("b.img")).unwrap();
    for line in [
        "subvolume create b.img:/s",
        "subvolume snapshot -r b.img:/s b.img:/s1",
        "mkdir b.img:/s/new",
        "subvolume snapshot -r b.img:/s b.img:/s2",
        "send -q -f stream b.img:/s1",
    ] {
        assert!(run(line, bed.dir(), Sink::Null, Sink::Null).status.success(), "{line}");
    }
    for line in
        ["send --diff b.img:/s1 b.img:/s2", "send --diff --json b.img:/s1 b.img:/s2", "receive --dump -f stream"]
    {
        let full = run(line, bed.dir(), Sink::Full, Sink::Pipe);
        let stderr = String::from_utf8_lossy(&full.stderr).into_owned();
        assert!(
            full.status.code() == Some(1) && stderr.contains("cannot write to standard output"),
            "{line}: {stderr}"
        );
        let gone = run(line, bed.dir(), Sink::NoReader, Sink::Pipe);
        assert_eq!((gone.status.code(), &*String::from_utf8_lossy(&gone.stderr)), (Some(141), ""), "{line}");
    }
    // The failure of a send of several subvolumes names all of them.
    let both = run("send -q -f /dev/full b.img:/s1 b.img:/s2", bed.dir(), Sink::Null, Sink::Pipe);
    let stderr = String::from_utf8_lossy(&both.stderr).into_owned();
    assert!(both.status.code() == Some(1) && stderr.contains("cannot send b.img:/s1, b.img:/s2"), "{stderr}");
}

/// A change is kept even if its report is lost.
#[test]
fn a_change_is_kept_where_its_report_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let work = dir.path();
    for lost in [Sink::Full, Sink::NoReader, Sink::Closed] {
        let _ = fs::remove_file(work.join("a.img"));
        assert_ne!(run("mkfs -b 128M a.img", work, lost, Sink::Null).status.code(), Some(0));
        assert_ne!(run("subvolume create a.img:/s", work, lost, Sink::Null).status.code(), Some(0), "{lost:?}");
        assert_ne!(run("subvolume snapshot a.img:/s a.img:/t", work, lost, Sink::Null).status.code(), Some(0));
        let listed = run("ls a.img", work, Sink::Pipe, Sink::Null);
        assert_eq!(String::from_utf8_lossy(&listed.stdout), "s\nt\n", "{lost:?}");
        assert_ne!(run("subvolume delete a.img:/t", work, lost, Sink::Null).status.code(), Some(0));
        let listed = run("ls a.img", work, Sink::Pipe, Sink::Null);
        assert_eq!(String::from_utf8_lossy(&listed.stdout), "s\n", "{lost:?}");
        assert_eq!(run("check a.img", work, Sink::Null, Sink::Null).status.code(), Some(0));
    }
    // A closed input is not an empty archive.
    let output = run("import - a.img:/ <&-", work, Sink::Null, Sink::Pipe);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && stderr.contains("standard input is closed"), "{stderr}");
}
