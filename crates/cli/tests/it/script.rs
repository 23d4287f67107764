//! Tests of `ubtrfs edit`, which does all commands of a script or none, and of `ubtrfs shell`.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use ubtrfs_testkit::{btrfs_check, capability};

use crate::common::{ok, on_terminal, refused, text, ubtrfs};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

struct Bed {
    dir: TempDir,
    image: String,
}

impl Bed {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let image = text(&dir.path().join("a.img"));
        fs::write(dir.path().join("host file"), "from the host").unwrap();
        ok(ubtrfs(["mkfs", "-q", "-b", "256M", &image]));
        ok(ubtrfs(["mkdir", "-p", &format!("{image}:/etc/old")]));
        ok(ubtrfs(["cp", &text(&dir.path().join("host file")), &format!("{image}:/etc/kept")]));
        Self { dir, image }
    }

    fn run(&self, args: &[&str], input: &[u8]) -> Output {
        let mut command = Command::new(UBTRFS);
        command.args(args).current_dir(self.dir.path()).env("LC_ALL", "C");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A command that fails early closes its input.
        let _ = child.stdin.take().unwrap().write_all(input);
        child.wait_with_output().unwrap()
    }

    fn edit(&self, script: &str) -> Output {
        self.run(&["edit", "a.img", "-"], script.as_bytes())
    }

    fn tree(&self) -> String {
        ok(ubtrfs(["ls", "-lR", &format!("{}:/", self.image)]))
    }

    fn generation(&self) -> String {
        let dumped = ok(ubtrfs(["inspect", "dump-super", &self.image]));
        dumped.lines().find(|line| line.starts_with("generation")).unwrap().to_owned()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if !std::thread::panicking() && capability::kernel_oracle() {
            btrfs_check(Path::new(&self.image)).unwrap();
        }
    }
}

#[test]
fn e2_all_commands_of_a_script_are_one_transaction() {
    let bed = Bed::new();
    let before: u64 = bed.generation().split_whitespace().last().unwrap().parse().unwrap();
    let script = "# A comment, and an empty line\n\n\
        mkdir -p :/usr/bin :/var\n\
        cd :/usr\n\
        cp 'host file' ':bin/a program'\n\
        chmod 755 ':bin/a program'\n\
        ln -s bin/x :link\n\
        cd\n\
        mv :etc/kept :var/moved\n\
        rm -r :etc/old\n\
        setfattr -n user.a -v b :/var\n\
        cat :/var/moved\n\
        ls :/usr/../usr";
    assert_eq!(ok(bed.edit(script)), "from the hostbin\nlink\n");
    let at = |path: &str| format!("{}:{path}", bed.image);
    assert_eq!(ok(ubtrfs(["find", &at("/")])).lines().count(), 8);
    assert_eq!(ok(ubtrfs(["cat", &at("/usr/bin/a program")])), "from the host");
    assert!(ok(ubtrfs(["ls", "-l", &at("/usr/bin")])).contains("rwxr-xr-x"));
    let after: u64 = bed.generation().split_whitespace().last().unwrap().parse().unwrap();
    assert_eq!(after, before + 1, "one commit");
}

#[test]
fn e2_a_script_that_fails_changes_nothing() {
    let bed = Bed::new();
    let (tree, generation) = (bed.tree(), bed.generation());
    let steps = "mkdir :/new\ncp 'host file' :/new/f\nrm -r :/etc\n";
    for (last, words) in [
        ("rm :/missing", &["line 4", "rm :/missing", "is as it was"][..]),
        ("cp missing :/new", &["line 4", "is as it was"]),
        ("import missing.tar a.img:/", &["line 4", "is as it was"]),
        ("cp a.img :/new/a.img", &["line 4", "is as it was"]),
    ] {
        let done = bed.edit(&format!("{steps}{last}\nmkdir :/later\n"));
        assert_eq!(done.status.code(), Some(1), "{last}");
        let message = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(words.iter().all(|word| message.contains(word)), "{last}: {message}");
        assert_eq!((bed.tree(), bed.generation()), (tree.clone(), generation.clone()), "{last}");
    }
}

#[test]
fn e1_a_mistake_in_a_line_is_found_before_anything_is_done() {
    let bed = Bed::new();
    let generation = bed.generation();
    for (line, words) in [
        ("rm 'open", &["line 2", "quote"][..]),
        ("subvolume create :/s", &["line 2", "'subvolume' cannot be part of an edit"]),
        ("mount a.img mnt", &["line 2", "'mount' cannot"]),
        ("shell a.img", &["line 2", "'shell' cannot"]),
        ("edit a.img -", &["line 2", "'edit' cannot"]),
        ("cd a b", &["line 2", "cd takes one directory"]),
        ("", &["has no command"]),
    ] {
        let first = if line.is_empty() { "# nothing" } else { "mkdir :/new" };
        refused(&bed.edit(&format!("{first}\n{line}\n")), words);
    }
    let done = bed.edit("mkdir :/new\nfrobnicate :/x\n");
    assert!(!done.status.success() && String::from_utf8_lossy(&done.stderr).contains("line 2"), "{done:?}");
    refused(&bed.run(&["edit", "a.img", "no-script"], b""), &["no-script", "does not exist"]);
    refused(&bed.run(&["edit", "no.img", "-"], b"ls :\n"), &["no.img"]);
    assert_eq!(bed.generation(), generation);
}

#[test]
fn options_of_the_image_are_given_to_edit() {
    let bed = Bed::new();
    refused(&bed.run(&["edit", "-o", "ro", "a.img", "-"], b"mkdir :/x\n"), &["cannot be changed"]);
    let done = bed.edit("mkdir -o compress=zstd :/x\n");
    assert!(String::from_utf8_lossy(&done.stderr).contains("give -o and --memory to the command"), "{done:?}");
    ok(bed.run(&["edit", "-o", "compress=zstd", "a.img", "-"], b"mkdir :/x\n"));
}

/// Kills the program while a script runs. The image has all of the script's changes or none.
#[test]
fn e2_a_killed_edit_leaves_all_or_nothing() {
    let bed = Bed::new();
    let script: String = (0..4000).map(|number| format!("mkdir :/d{number}\n")).collect();
    fs::write(bed.dir.path().join("script"), script).unwrap();
    for delay in [3, 10, 30, 60, 100, 200] {
        let mut command = Command::new(UBTRFS);
        command.args(["edit", "a.img", "script"]).current_dir(bed.dir.path()).stdout(Stdio::null());
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(delay));
        child.kill().unwrap();
        child.wait().unwrap();
        let names = ok(ubtrfs(["ls", &format!("{}:/", bed.image)])).lines().count();
        assert!(matches!(names, 1 | 4001), "{names} names after {delay} ms");
        if names > 1 {
            break;
        }
    }
}

#[test]
fn the_shell_runs_lines_of_its_input() {
    let bed = Bed::new();
    let lines = "ls :\ncd :etc\nls :\nmkdir :new\nls :new/..\ncd :missing\nls ':kept'\nsubvolume create :sub\n";
    let done = bed.run(&["shell", "a.img"], lines.as_bytes());
    assert_eq!(
        String::from_utf8_lossy(&done.stdout),
        "etc\nkept\nold\nkept\nnew\nold\n/etc/kept\nCreate subvolume 'a.img:/etc/sub'\n"
    );
    assert!(String::from_utf8_lossy(&done.stderr).contains("missing"), "{done:?}");
    assert!(done.status.success(), "the status of the last command: {done:?}");
    let ended = bed.run(&["shell", "a.img"], b"rm :/missing\nexit\nmkdir :/never\n");
    assert_eq!(ended.status.code(), Some(1));
    assert!(!bed.tree().contains("never") && bed.tree().contains("sub"));
    refused(&bed.run(&["shell", "a.img"], b"shell a.img\n"), &["this is a shell already"]);
    refused(&bed.run(&["shell", "no.img"], b""), &["no.img"]);
}

#[test]
fn the_shell_has_a_prompt_history_and_completion() {
    if !capability::program("python3") {
        return;
    }
    let bed = Bed::new();
    let steps = [
        ("a.img:/> ", "cat :/et\tke\t\r"),
        ("from the host", ""),
        ("a.img:/> ", "cd :etc\r"),
        ("a.img:/etc> ", "\u{1b}[A\u{1b}[A\r"),
        ("from the host", ""),
        ("a.img:/etc> ", "nonsense\u{3}"),
        ("a.img:/etc> ", "\u{4}"),
    ];
    ok(on_terminal(bed.dir.path(), &["shell", "a.img"], &steps));
}

#[test]
fn ctrl_c_ends_a_command_and_not_the_shell() {
    if !capability::program("python3") || !capability::program("mkfifo") {
        return;
    }
    let bed = Bed::new();
    ubtrfs_testkit::run("mkfifo", [bed.dir.path().join("pipe")]).unwrap();
    let steps = [
        ("a.img:/> ", "cp pipe :/never\r"),
        // The copy waits for the pipe.
        ("cp pipe", "\u{3}"),
        ("the command was ended by signal 2", ""),
        // Typed ahead, and pasted with two line ends.
        ("a.img:/> ", "cd :etc\rls\rpwd\r"),
        ("kept", ""),
        ("/etc", ""),
        ("a.img:/etc> ", "\u{1b}[200~mkdir :one\nmkdir :two\n\u{1b}[201~\r"),
        ("a.img:/etc> ", "help\r"),
        ("change the directory", ""),
        ("a.img:/etc> ", "exit 7\r"),
    ];
    let ended = on_terminal(bed.dir.path(), &["shell", "a.img"], &steps);
    assert_eq!(ended.status.code(), Some(7), "{}", String::from_utf8_lossy(&ended.stderr));
    assert_eq!(ok(ubtrfs(["ls", &format!("{}:/etc", bed.image)])), "kept\nold\none\ntwo\n");
}

#[test]
fn an_edit_fails_for_a_line_of_help_and_a_directory_that_is_absent() {
    let bed = Bed::new();
    let before = bed.tree();
    let helped = bed.run(&["edit", "a.img", "-"], b"mkdir :/k\ntouch --help\n");
    assert_eq!(helped.status.code(), Some(1));
    let absent = bed.run(&["edit", "a.img", "-"], b"mkdir :/k\ncd :/nope\ntouch :x\n");
    refused(&absent, &["line 2 of standard input", "nope", "a.img is as it was"]);
    assert_eq!(bed.tree(), before);
    ok(bed.run(&["edit", "a.img", "-"], b"mkdir :/k\ncd :/k\ntouch :x\n"));
    assert_eq!(ok(ubtrfs(["ls", &format!("{}:/k", bed.image)])), "x\n");
}

#[test]
fn an_edit_changes_no_other_image_and_may_read_it() {
    let bed = Bed::new();
    let other = text(&bed.dir.path().join("b.img"));
    ok(ubtrfs(["mkfs", "-q", "-b", "128M", &other]));
    ok(ubtrfs(["mkdir", &format!("{other}:/there")]));
    for line in
        ["mkdir b.img:/x", "cp 'host file' b.img:/", "import --create 128M none.tar c.img:/", "rm -r b.img:/there"]
    {
        let refused_line = bed.run(&["edit", "a.img", "-"], format!("mkdir :/y\n{line}\n").as_bytes());
        assert!(!refused_line.status.success(), "{line}");
        let names = ok(ubtrfs(["ls", &other])) + &ok(ubtrfs(["ls", &bed.image]));
        assert_eq!(names, "there\netc\n", "{line}");
    }
    let said = bed.run(&["edit", "a.img", "-"], b"mkdir b.img:/x\n").stderr;
    let reason = "b.img is not changed, because an edit changes only a.img";
    assert!(String::from_utf8_lossy(&said).contains(reason), "{}", said.escape_ascii());
    ok(bed.run(&["edit", "a.img", "-"], b"cp -r b.img:/there :/copied\n"));
    assert_eq!(ok(ubtrfs(["ls", &bed.image])), "copied\netc\n");
}

#[test]
fn a_command_of_a_shell_reads_what_follows_its_line() {
    let bed = Bed::new();
    let tar = ok(ubtrfs(["export", &format!("{}:/etc", bed.image), "-f", &text(&bed.dir.path().join("t.tar"))]));
    assert_eq!(tar, "");
    let archive = fs::read(bed.dir.path().join("t.tar")).unwrap();
    ok(bed.run(&["shell", "a.img"], &[b"mkdir :/new\nimport - :/new\n", &archive[..]].concat()));
    assert_eq!(ok(ubtrfs(["ls", &format!("{}:/new", bed.image)])), "kept\nold\n");
}
