//! Tests of the commands that edit images without a mount: mv, ln, chmod, chown, touch, truncate, setfattr, getfattr,
//! find, and patterns in paths.
//!
//! Method: Linux makes an image with one directory for each case. On one copy, each case runs the program of the system
//! in a mount of Linux, and on another copy, ubtrfs runs with the same arguments. Both must succeed or fail, and
//! afterwards Linux sees equal trees. Images end clean for `btrfs check` and a scrub.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;
use ubtrfs_testkit::capability::{kernel_oracle, program};
use ubtrfs_testkit::{Compare, Image, LoopMount, TreeEntry, btrfs_check, compare_entries, judge, run as sh, walk_path};

use crate::common::{ok, refused, text, ubtrfs};

/// Makes the files of a case in the current directory. `vol` is a subvolume.
const FILES: &str = r#"
    echo content > f; echo other > x; chmod 755 x; head -c 300000 /dev/urandom > big
    mkdir -p d/sub e e2 dg; chmod 3775 dg; echo a > d/a; echo f > d/f; echo y > d/sub/y
    echo s > s; chmod 6755 s; setfattr -n security.capability -v 0x0000000200200000000000000000000000000000 s
    echo g > g; chmod 2745 g; echo acl > acl; setfacl -m u:5:rwx,m::rw acl; setfacl -m d:u:5:rwx e2
    ln -s f lf; ln -s d ld; ln -s nowhere dangling; ln -s ../f d/l; echo h > h1; ln h1 h2; mkfifo fifo
    for name in a b; do setfattr -n user.$name -v "value of $name" f; done; setfattr -n user.bytes -v 0x00ff0a f
    btrfs -q subvolume create vol; echo v > vol/v; echo old > vol/x; mkdir vol/vd
"#;

/// Cases: a command and its arguments. `@` stands for the directory of the case.
const CASES: &[&str] = &[
    "chmod 600 @missing @f",
    "chmod u+w @dangling",
    "chmod 4711 @lf @ld",
    "chmod 600 @lf/",
    "chmod -R go-rwx @d",
    "chmod -R a=rX @d @s",
    "chmod -R 700 @ld",
    "chmod -R u=rwx,go= @vol @dg",
    "chmod +x @",
    "chown 5:6 @f @s @g @d @dg @acl @lf @fifo",
    "chown :7 @s @g",
    "chown -h 5 @lf @dangling @f",
    "chown 5 @dangling @f",
    "chown root: @f @s",
    "chown daemon:daemon @f",
    "chown no-such-user @f",
    "chown -R 5:6 @d @f",
    "chown -R 5 @ld",
    "chown -R 5 @ld/",
    "chown -R 5:5 @",
    "mv @f @new",
    "mv @f @x",
    "mv @f @d",
    "mv @f @d/",
    "mv @f @x @h1 @d",
    "mv @f @x @new",
    "mv @f @lf",
    "mv @f @ld",
    "mv @f @dangling",
    "mv @lf @new",
    "mv -T @lf @ld",
    "mv -T @f @d",
    "mv -T @e @e2",
    "mv -T @d @e2",
    "mv -T @e2 @d",
    "mv @e @e2",
    "mv @d @d/sub",
    "mv @d @d",
    "mv @f @f",
    "mv @h1 @h2",
    "mv @h1 @d",
    "mv @d @f",
    "mv -n @f @x",
    "mv -n @f @new",
    "mv -n -f @f @x",
    "mv -f -n @f @x",
    "mv @f/ @new",
    "mv @d/ @new",
    "mv @d/ @new/",
    "mv @f @new/",
    "mv @missing @new",
    "mv @missing @f @d",
    "mv @f @missing/new",
    "mv @f @x/new",
    "mv @d/. @new",
    "mv @f @d/f @e2",
    "mv @fifo @dangling @e",
    "mv @ld @new",
    "mv @d/../f @d/sub/../new",
    "mv @f @vol",
    "mv @f @vol/x",
    "mv @f @x @vol/vd",
    "mv @d @vol",
    "mv @d @vol/vd",
    "mv -T @d @vol/vd",
    "mv -T @e @vol",
    "mv @s @acl @lf @fifo @big @vol",
    "mv @h1 @vol",
    "mv @h2 @vol/x",
    "mv @vol/x @f",
    "mv @vol/v @d",
    "mv @vol/vd @e",
    "mv @d @vol/x",
    "mv @f @vol/missing/x",
    "mv -n @f @vol/x",
    "mv @vol @new",
    "mv @vol @d",
    "mv @vol @vol/vd",
    "ln @f @new",
    "ln @f @d/sub",
    "ln @f @d",
    "ln -f @f @d",
    "ln @f @x",
    "ln -f @f @x",
    "ln -f @h1 @h2",
    "ln -f @f @f",
    "ln @f @x @e",
    "ln @f @x @new",
    "ln @d @new",
    "ln @lf @new",
    "ln @dangling @new",
    "ln @missing @new",
    "ln @f @new/",
    "ln @f @vol/new",
    "ln @s @acl @fifo @e",
    "ln -s text @new",
    "ln -s text @d",
    "ln -s a/b/ c @d",
    "ln -s text @f",
    "ln -sf text @f",
    "ln -s text @ld",
    "ln -sn text @ld",
    "ln -sfn text @ld",
    "ln -sT text @d",
    "ln -sfT text @d",
    "ln -sfT text @ld",
    "ln -s text @missing/x",
    "ln -s text @dangling",
    "ln -sf text @dangling",
    "ln -s /absolute/../text @vol/new",
    "touch @new @f @d @lf",
    "touch -c @new",
    "touch -h @dangling @lf",
    "touch @missing/x @new",
    "touch @new/",
    "touch @f/x",
    "touch @e2/new",
    "touch -r @f @new",
    "touch -r @missing @new",
    "truncate -s 10K @f @new @lf",
    "truncate -s +5 @f @big",
    "truncate -s -3 @f @big",
    "truncate -s -1M @big",
    "truncate -s 0 @big @f",
    "truncate -s 100001 @big",
    "truncate -s 1M @big",
    "truncate -s %4096 @f @big",
    "truncate -s /4096 @f @big",
    "truncate -s <5 @f @g",
    "truncate -s >9 @f @big",
    "truncate -c -s 5 @new",
    "truncate -s 5 @d",
    "truncate -s 5 @missing/x",
    "truncate -s 5 @fifo/x",
    "truncate -s 1 @s @g",
    "truncate -s 2 @s",
    "setfattr -n user.a -v v @f @d @lf",
    "setfattr -n user.new @f",
    "setfattr -x user.a @f",
    "setfattr -x user.none @f",
    "setfattr -x user.a @f @x @missing",
    "setfattr -n trusted.x -v 0x00ff @f",
    "setfattr -n user.q -v \"a\\\"b\\\\c\\101\" @f",
    "setfattr -n user.s -v 0sYWI= @f",
    "setfattr -h -n user.a -v 1 @lf",
    "setfattr -h -n trusted.a -v 1 @lf",
    "setfattr -n user.a -v 1 @fifo",
    "setfattr -n bogus.x -v 1 @f",
    "setfattr -n user. -v 1 @f",
    "setfattr -n security.capability -v 0x0000000200200000000000000000000000000000 @f",
    "setfattr -x security.capability @s",
    "setfattr -x system.posix_acl_access @acl",
    "setfattr -n btrfs.compression -v zstd @f @d",
    "setfattr -n btrfs.compression -v none-such @f",
    "rm @f @missing @x",
    "rm -rf @d @vol/vd",
    "mkdir @new @f @missing/x @newer",
];

/// Modes that are given to files of all kinds.
const MODES: &[&str] = &[
    "755",
    "0",
    "6755",
    "00755",
    "07777",
    "u+x",
    "+x",
    "-w",
    "-rwx",
    "=rw",
    "a=rX",
    "u=g",
    "g=u-w",
    "go=",
    "u+s",
    "g-s",
    "+t",
    "o+t",
    "u+t",
    "a+s",
    "ug=s",
    "=",
    "-r,+X",
    "a-x,a+X",
    "=755",
    "+6000",
    "-7000",
    "o=g",
    "u=rwx,go=rx",
    "g=o+w",
    "a=",
    "u=s",
    "g=rwxs",
    "+s",
    "=t",
    "X",
    "8",
    "u+rg",
    "o+X,u-x",
    "-s",
    "u=rwx,g+u,o=g-w",
    "0000755",
    "ugo+rwX",
];

fn ready() -> bool {
    kernel_oracle() && ["setfattr", "setfacl", "bash"].into_iter().all(program)
}

/// A directory with an image of Linux that has the files of all cases, and copies of the image.
struct Bed {
    dir: TempDir,
    /// Command lines, each of which has the directory `cNUMBER`.
    cases: Vec<String>,
}

impl Bed {
    fn new(cases: Vec<String>) -> Self {
        let bed = Self { dir: TempDir::new().unwrap(), cases };
        let image = Image::kernel_made(2 << 30, &[]).unwrap();
        let mount = LoopMount::new(image.path(), "").unwrap();
        let script = format!(
            "cd {}; for ((at = 0; at < {}; at++)); do mkdir c$at; cd c$at; {FILES} cd ..; done",
            mount.path().display(),
            bed.cases.len()
        );
        sh("bash", ["-euc", &script]).unwrap();
        mount.close().unwrap();
        for name in ["linux.img", "ours.img"] {
            sh("cp", ["--sparse=always", &text(image.path()), &text(&bed.join(name))]).unwrap();
        }
        bed
    }

    fn join(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs all cases with the programs of the system, in a mount of Linux.
    fn run_linux(&self, mount: &Path) -> Vec<Output> {
        let one = |(at, case): (usize, &String)| {
            let dir = mount.join(format!("c{at}"));
            let words = case.split(' ').map(|word| word.replace('@', &format!("{}/", dir.display())));
            let mut command = Command::new("sh");
            command.args(["-c", "umask 022; exec \"$@\"", "sh"]).args(words).current_dir(&dir);
            command.env("LC_ALL", "C").env("TZ", "UTC").stdin(Stdio::null()).output().unwrap()
        };
        self.cases.iter().enumerate().map(one).collect()
    }

    /// Runs all cases with ubtrfs.
    fn run_ours(&self, image: &Path) -> Vec<Output> {
        let one = |(at, case): (usize, &String)| {
            let dir = format!("{}:/c{at}/", image.display());
            ubtrfs(case.split(' ').map(|word| word.replace('@', &dir)))
        };
        self.cases.iter().enumerate().map(one).collect()
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ")
}

/// The trees of all cases of an image, as Linux sees them. One image is mounted at a time, because copies of an image have
/// the same id.
fn entries(image: &Path, nr_cases: usize) -> Vec<Vec<TreeEntry>> {
    let mount = LoopMount::new(image, "ro").unwrap();
    let found = (0..nr_cases).map(|at| walk_path(&mount.join(format!("c{at}"))).unwrap()).collect();
    mount.close().unwrap();
    found
}

#[test]
fn edits_have_the_effects_of_the_programs_of_the_system() {
    if !ready() {
        return;
    }
    let modes = MODES.iter().map(|mode| format!("chmod -- {mode} @f @s @g @x @d @dg @acl @lf @vol"));
    let bed = Bed::new(CASES.iter().map(ToString::to_string).chain(modes).collect());
    let (linux, ours) = (bed.join("linux.img"), bed.join("ours.img"));
    let mount = LoopMount::new(&linux, "").unwrap();
    let by_linux = bed.run_linux(mount.path());
    mount.close().unwrap();
    let by_us = bed.run_ours(&ours);
    let (linux, ours) = (entries(&linux, bed.cases.len()), entries(&ours, bed.cases.len()));
    let mut wrong = Vec::new();
    for (at, case) in bed.cases.iter().enumerate() {
        if let Err(error) = compare_entries(&linux[at], &ours[at], Compare { root: true, ..Compare::MODEL }) {
            wrong.push(format!("{case}: {error:#}"));
        }
        if by_linux[at].status.success() != by_us[at].status.success() {
            wrong.push(format!("{case}: Linux: '{}', ours: '{}'", stderr(&by_linux[at]), stderr(&by_us[at])));
        }
        let said = stderr(&by_us[at]);
        if !by_us[at].status.success() && !said.starts_with("ubtrfs: ") {
            wrong.push(format!("{case}: {said}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), bed.cases.len(), wrong.join("\n"));
    judge(&bed.join("ours.img"), "", &[]).unwrap();
    ok(ubtrfs(["check", "--check-data-csum", &text(&bed.join("ours.img"))]));
}

#[test]
fn times_are_those_of_touch() {
    if !ready() {
        return;
    }
    let cases = [
        "touch -d 2001-02-03 @f",
        "touch -a -d @981173106.789012345 @f @d",
        "touch -m -d 2001-02-03T04:05:06.789012345Z @lf",
        "touch -d 2001-02-03T04:05+01:30 @fifo @new",
        "touch -h -d @-5.25 @lf @f",
        "touch -d @1 @f",
        "touch -r @f @x",
        "touch -a -r @f @x @new",
        "touch -c -d @7 @new @x",
    ];
    let bed = Bed::new(cases.map(str::to_owned).to_vec());
    let (linux, ours) = (bed.join("linux.img"), bed.join("ours.img"));
    let mount = LoopMount::new(&linux, "").unwrap();
    bed.run_linux(mount.path());
    mount.close().unwrap();
    bed.run_ours(&ours);
    let times = |image: &Path| {
        let mount = LoopMount::new(image, "ro").unwrap();
        let mut shown = Vec::new();
        for (at, case) in cases.iter().enumerate() {
            let names = case.split(' ').filter_map(|word| word.strip_prefix('@'));
            for name in names.filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase())) {
                // The other time of a new file is the current time.
                let format = match (case.contains(" -a "), case.contains(" -m "), name) {
                    (true, _, "new") => "%x",
                    (_, true, _) => "%y",
                    _ => "%x %y",
                };
                let path = mount.join(format!("c{at}/{name}"));
                let times = path.symlink_metadata().ok().map(|_| sh("stat", ["-c", format, &text(&path)]).unwrap());
                shown.push((*case, name, times));
            }
        }
        mount.close().unwrap();
        shown
    };
    assert_eq!(times(&ours), times(&linux));
    // A host file as reference, and what stat prints as a date.
    let (image, host) = (text(&bed.join("ours.img")), bed.join("host"));
    fs::write(&host, "").unwrap();
    sh("touch", ["-d", "2011-11-11 11:11:11.1 UTC", &text(&host)]).unwrap();
    ok(ubtrfs(["touch", "-r", &text(&host), &format!("{image}:/c0/big")]));
    let shown = ok(ubtrfs(["stat", &format!("{image}:/c0/big")]));
    assert!(shown.contains("modify: 2011-11-11 11:11:11.100000000 UTC"), "{shown}");
    ok(ubtrfs(["touch", "-d", "2011-11-11 11:11:11.100000001 UTC", &format!("{image}:/c0/big")]));
    assert!(ok(ubtrfs(["stat", &format!("{image}:/c0/big")])).contains("11.100000001 UTC"));
    btrfs_check(&bed.join("ours.img")).unwrap();
}

#[test]
fn patterns_lead_to_the_files_that_a_shell_finds() {
    if !ready() {
        return;
    }
    let bed = Bed::new(vec![String::new()]);
    let ours = bed.join("ours.img");
    let mount = LoopMount::new(&ours, "").unwrap();
    let more = "cd c0; mkdir p p/one p/two p/.dot 'p/[x]'; touch p/one/a.conf p/one/b.conf p/two/a.conf p/two/c.txt p/.hidden \
                'p/*' 'p/a?' p/ab p/aä p/[x]/in 'p/one/sp ace' $'p/one/\\xff'; ln -s one p/link; ln -s nowhere p/away";
    sh("bash", ["-euc", &format!("cd {}; {more}", mount.path().display())]).unwrap();
    let patterns = [
        "p/*/*.conf",
        "p/o*/?.conf",
        "p/[ot]*/a.conf",
        "p/[!o]*/a.conf",
        "p/[^o]*/a.conf",
        "p/*/",
        "p/.*den",
        "p/a?",
        "p/?b",
        "p/one/*",
        "p/li*/*.conf",
        "p/aw*",
        "*/one/a*",
        "p/[a-c]*",
        "p/*o/*t",
        "p/one/[!a-z]",
        "p/*/sp*",
        "d/../p/t*",
        "p/.d*/",
    ];
    let list = |pattern: &str| {
        let quoted = pattern.replace('\'', "");
        let script = format!(
            "export LC_ALL=C.UTF-8; shopt -u dotglob; shopt -s nullglob; cd {}/c0; printf '%s\\0' {quoted}",
            mount.path().display()
        );
        let output = Command::new("bash").args(["-euc", &script]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        output.stdout
    };
    let expected: Vec<BTreeSet<Vec<u8>>> = patterns
        .iter()
        .map(|pattern| {
            list(pattern).split(|byte| *byte == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect()
        })
        .collect();
    mount.close().unwrap();
    let top = format!("{}:/c0/", ours.display());
    for (pattern, expected) in patterns.iter().zip(expected) {
        let found = ubtrfs(["find", &format!("{top}{pattern}"), "-maxdepth", "0", "-print0"]);
        let names = found.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let names: BTreeSet<Vec<u8>> = names.map(|name| name[top.len()..].to_vec()).collect();
        // `a?` and `*` exist, so they stand for themselves.
        match *pattern {
            "p/a?" => assert_eq!(names, BTreeSet::from([b"p/a?".to_vec()])),
            _ => assert_eq!(names, expected, "{pattern}: {}", stderr(&found)),
        }
        assert!(!names.is_empty() && found.status.success(), "{pattern}");
    }
    // Every command on files takes patterns.
    let at = |path: &str| format!("{top}{path}");
    assert_eq!(ok(ubtrfs(["cat", &at("[fx]")])), "content\nother\n");
    assert_eq!(ok(ubtrfs(["ls", "-d", &at("p/*")])), format!("/c0/p/*\n"));
    assert!(ok(ubtrfs(["stat", &at("h?")])).contains("/c0/h2"));
    fs::create_dir(bed.join("out")).unwrap();
    ok(ubtrfs(["cp", &at("p/*/?.conf"), &text(&bed.join("out"))]));
    assert_eq!(fs::read_dir(bed.join("out")).unwrap().count(), 2);
    ok(ubtrfs(["cp", &at("p/one/*.conf"), &at("e")]));
    ok(ubtrfs(["mv", &at("p/two/*"), &at("e2")]));
    ok(ubtrfs(["chmod", "600", &at("e2/*")]));
    ok(ubtrfs(["chown", "7", &at("e2/*")]));
    ok(ubtrfs(["truncate", "-s", "5", &at("e2/*.txt")]));
    ok(ubtrfs(["setfattr", "-n", "user.p", "-v", "v", &at("e2/*.txt")]));
    assert!(ok(ubtrfs(["getfattr", "-d", &at("e2/*.t?t")])).contains("user.p=\"v\""));
    ok(ubtrfs(["touch", "-d", "@5", &at("e2/*")]));
    assert!(ok(ubtrfs(["ls", "-l", &at("e2/")])).contains("-rw------- 1 7 0 5 1970-01-01 00:00 c.txt"));
    ok(ubtrfs(["rm", &at("e/*"), &at("p/[[]x]/in")]));
    assert_eq!(ok(ubtrfs(["ls", &at("e")])), "");
    // Patterns that match nothing.
    for line in ["cat", "ls", "stat", "rm", "touch", "find", "getfattr", "chmod 600", "chown 5", "truncate -s 5"] {
        let mut words: Vec<&str> = line.split(' ').collect();
        let (none, some) = (at("e/*"), at("f"));
        words.extend([none.as_str(), some.as_str()]);
        let output = ubtrfs(&words);
        refused(&output, &["no name matches", "/c0/e/*", "no such file"]);
        if line == "rm" {
            sh("cp", [&text(&bed.join("out/a.conf")), &text(&bed.join("f"))]).unwrap();
            ok(ubtrfs(["cp", &text(&bed.join("f")), &at("f")]));
        }
    }
    refused(&ubtrfs(["mv", &at("e/*"), &at("d")]), &["no name matches"]);
    refused(&ubtrfs(["cp", &at("e/*"), &text(&bed.join("out"))]), &["no name matches"]);
    refused(&ubtrfs(["mkdir", &at("missing*/x")]), &["missing*"]);
    ok(ubtrfs(["rm", "-f", &at("e/*"), &at("missing/*")]));
    judge(&ours, "", &[]).unwrap();
}

#[test]
fn attributes_and_files_are_listed_as_by_getfattr_and_find() {
    if !ready() || !program("getfattr") {
        return;
    }
    let bed = Bed::new(vec![String::new()]);
    let ours = bed.join("ours.img");
    let top = format!("{}:/c0/", ours.display());
    let mount = LoopMount::new(&ours, "").unwrap();
    let lines = [
        "getfattr -d @f",
        "getfattr @f",
        "getfattr -d -m - @f @s @acl",
        "getfattr -n user.a @f",
        "getfattr -n user.none @f @s",
        "getfattr -d -e hex @f",
        "getfattr -d -e base64 @f",
        "getfattr -d @x",
        "getfattr -h -d @lf",
        "getfattr --only-values -n user.a @f",
        "find @",
        "find @ -type f",
        "find @ -type l,p",
        "find @ -name *d*",
        "find @ -maxdepth 1 -name [a-e]*",
        "find @d -mindepth 1",
        "find @ld",
        "find @ld/",
        "find @d @f @missing -maxdepth 0",
        "find @ -name .*",
    ];
    let with_top =
        |line: &str, top: &str| -> Vec<String> { line.split(' ').map(|word| word.replace('@', top)).collect() };
    // Without the names of the files, which differ, and in any order.
    let sorted = |output: &Output, top: &str| -> Vec<String> {
        let shown = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut lines: Vec<String> =
            shown.lines().filter(|line| !line.starts_with('#')).map(|line| line.replace(top, "@")).collect();
        lines.sort();
        lines
    };
    let system_top = format!("{}/c0/", mount.path().display());
    let expected: Vec<(Vec<String>, bool)> = lines
        .iter()
        .map(|line| {
            let words = with_top(line, &system_top);
            let output = Command::new(&words[0]).args(&words[1..]).env("LC_ALL", "C").output().unwrap();
            (sorted(&output, &system_top), output.status.success())
        })
        .collect();
    mount.close().unwrap();
    for (line, (expected, success)) in lines.iter().zip(expected) {
        let output = ubtrfs(with_top(line, &top));
        assert_eq!(sorted(&output, &top), expected, "{line}: {}", stderr(&output));
        assert_eq!(output.status.success(), success, "{line}: {}", stderr(&output));
    }
    let json: Value = serde_json::from_str(&ok(ubtrfs(["getfattr", "--json", &format!("{top}f")]))).unwrap();
    assert_eq!((&json["path"], &json["xattrs"][0]["name"]), (&"/c0/f".into(), &"user.a".into()));
    assert_eq!(
        (&json["xattrs"][0]["value"], &json["xattrs"][2]["value_hex"]),
        (&"value of a".into(), &"00ff0a".into())
    );
    let json = ok(ubtrfs(["find", "--json", &format!("{top}d"), "-name", "y"]));
    let found: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&found["path"], &found["type"]), (&"/c0/d/sub/y".into(), &"file".into()));
    assert_eq!(ok(ubtrfs(["find", &text(&ours), "-maxdepth", "0"])), format!("{}:/\n", ours.display()));
    btrfs_check(&ours).unwrap();
}

/// A directory with `a.img`, which has `/f`, `/d/g`, the subvolume `/s` with the snapshot `/ro`, and `b.img`.
struct Own(TempDir);

impl Own {
    fn new() -> Self {
        let own = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(own.0.path().join("root/d")).unwrap();
        fs::write(own.0.path().join("root/f"), "content of f").unwrap();
        fs::write(own.0.path().join("root/d/g"), "content of g").unwrap();
        // The model of other tests clears the umask of this process.
        for (path, mode) in [("root/d", 0o755), ("root/f", 0o644), ("root/d/g", 0o644)] {
            fs::set_permissions(own.0.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
        }
        for line in [
            "mkfs -q -b 256M -r root a.img",
            "mkfs -q -b 128M -r root b.img",
            "subvolume create a.img:/s",
            "cp a.img:/f a.img:/s",
            "subvolume snapshot -r a.img:/s a.img:/ro",
            "subvolume create a.img:/d/nested",
        ] {
            assert!(own.run(line).status.success(), "{line}");
        }
        own
    }

    fn run(&self, line: &str) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", "umask 022; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_ubtrfs")]).args(line.split(' '));
        command.current_dir(self.0.path()).stdin(Stdio::null()).output().unwrap()
    }

    /// Checks the images, and that they hold no temporary file.
    fn check(&self) {
        let all = ok(self.run("find a.img b.img"));
        assert!(!all.contains(".ubtrfs"), "{all}");
        for image in ["a.img", "b.img"] {
            ok(self.run(&format!("check --check-data-csum {image}")));
            if kernel_oracle() {
                btrfs_check(&self.0.path().join(image)).unwrap();
            }
        }
    }
}

#[test]
fn what_cannot_be_edited_is_refused_with_the_reason() {
    let own = Own::new();
    for (line, words) in [
        ("mv a.img:/f b.img:/f", &["another image", "ubtrfs cp -a", "ubtrfs rm -r"][..]),
        ("mv root/f a.img:/x", &["root/f", "IMAGE:/path"]),
        ("mv a.img:/f root/x", &["root/x", "IMAGE:/path"]),
        ("mv a.img:/ a.img:/x", &["root directory"]),
        ("mv a.img:/f a.img:/ro", &["read-only subvolume"]),
        ("mv a.img:/ro/f a.img:/", &["read-only subvolume"]),
        ("mv a.img:/d a.img:/s", &["a.img:/d/nested", "move that subvolume first"]),
        ("mv a.img:/d/.. a.img:/x", &["ends in '.' or '..'"]),
        ("mv a.img:/f a.img:/no/x", &["a.img:/no", "no such file"]),
        ("ln a.img:/f b.img:/x", &["another image"]),
        ("ln root/f a.img:/x", &["root/f", "-s"]),
        ("ln a.img:/f a.img:/s/x", &["different subvolumes"]),
        ("ln a.img:/f a.img:/d/g", &["it exists", "-f"]),
        ("ln a.img:/f root/x", &["IMAGE:/path"]),
        ("ln -s x a.img:/ro/l", &["a.img:/ro/l", "read-only subvolume"]),
        ("chmod 600 a.img:/ro/f", &["a.img:/ro/f", "read-only subvolume"]),
        ("chmod -R 600 a.img:/ro/f", &["a.img:/ro/f", "read-only subvolume"]),
        ("chmod 999 a.img:/f", &["'999'", "755"]),
        ("chmod u+z a.img:/f", &["'u+z'"]),
        ("chmod 600 root/f", &["root/f", "IMAGE:/path"]),
        ("chown 5 a.img:/ro/f", &["read-only subvolume"]),
        ("chown no-such-user a.img:/f", &["'no-such-user'", "/etc/passwd"]),
        ("chown 5: a.img:/f", &["USER:GROUP"]),
        ("chown 4294967295 a.img:/f", &["4294967295"]),
        ("touch a.img:/ro/f", &["read-only subvolume"]),
        ("touch a.img:/ro/new", &["cannot make a.img:/ro/new", "read-only subvolume"]),
        ("touch -d yesterday a.img:/f", &["'yesterday'", "@SECONDS"]),
        ("touch -r root/missing a.img:/f", &["root/missing", "No such file"]),
        ("touch -r b.img:/missing a.img:/f", &["b.img:/missing", "no such file"]),
        ("truncate -s 5 a.img:/d", &["a.img:/d is a directory"]),
        ("truncate -s 5 a.img:/ro/f", &["read-only subvolume"]),
        ("truncate -s +8E a.img:/f", &["8E"]),
        ("truncate a.img:/f", &["--size"]),
        ("setfattr a.img:/f", &["--name"]),
        ("setfattr -n user.a -v 0x1 a.img:/f", &["'0x1'", "two hexadecimal digits"]),
        ("setfattr -n user.a -v v a.img:/ro/f", &["user.a", "read-only subvolume"]),
        ("setfattr -n a -v v a.img:/f", &["not supported"]),
        ("getfattr -n user.none a.img:/f", &["a.img:/f", "user.none", "no such attribute"]),
        ("find a.img:/f -type x", &["'x'", "f, d, l"]),
        ("find a.img:/missing", &["a.img:/missing", "no such file"]),
        ("find a.img:/f/", &["not a directory"]),
        ("find root", &["root"]),
    ] {
        refused(&own.run(line), words);
    }
    assert_eq!(ok(own.run("find a.img:/ -type f")), "a.img:/d/g\na.img:/f\na.img:/ro/f\na.img:/s/f\n");
    assert_eq!(ok(own.run("cat a.img:/f a.img:/s/f")), "content of fcontent of f");
    own.check();
}

#[test]
fn a_failed_operand_does_not_stop_the_others() {
    let own = Own::new();
    let tried = |line: &str, nr_errors: usize| {
        let output = own.run(line);
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert_eq!(stderr(&output).matches("ubtrfs: ").count(), nr_errors, "{line}: {}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    tried("chmod 600 a.img:/missing a.img:/f b.img:/missing b.img:/f no.img:/x", 3);
    tried("chown 7:8 a.img:/missing a.img:/f no.img:/x b.img:/f", 2);
    tried("touch -d @5 a.img:/missing/x a.img:/f no.img:/x b.img:/f", 2);
    tried("setfattr -n user.a -v v a.img:/missing a.img:/f no.img:/x b.img:/f", 2);
    tried("chmod -R g+w a.img:/missing a.img:/ro a.img:/d", 3);
    for image in ["a.img", "b.img"] {
        assert!(ok(own.run(&format!("ls -l {image}:/f"))).contains("-rw------- 1 7 8 12 1970-01-01 00:00"), "{image}");
    }
    assert!(ok(own.run("ls -l a.img:/d")).contains("-rw-rw-r--"));
    assert!(tried("getfattr -d a.img:/missing a.img:/f no.img:/x b.img:/f", 2).matches("user.a=\"v\"").count() == 2);
    assert!(tried("find a.img:/missing a.img:/d no.img:/ b.img:/d -type f", 2).lines().count() == 2);
    tried("truncate -s 3 a.img:/missing/x a.img:/f no.img:/x b.img:/f", 2);
    tried("ln a.img:/missing a.img:/f a.img:/d", 1);
    tried("mv a.img:/missing a.img:/f a.img:/s", 1);
    assert_eq!(ok(own.run("cat a.img:/s/f a.img:/d/f b.img:/f")), "conconcon");
    tried("mkdir a.img:/d a.img:/made no.img:/x", 2);
    tried("rm a.img:/missing a.img:/d/f no.img:/x b.img:/f", 2);
    assert_eq!(ok(own.run("ls a.img b.img")), "a.img:/:\nd\nmade\nro\ns\n\nb.img:/:\nd\n");
    own.check();
}

#[test]
fn a_move_to_another_subvolume_shares_the_data() {
    let own = Own::new();
    fs::write(own.0.path().join("big"), vec![7; 20 << 20]).unwrap();
    ok(own.run("cp big a.img:/big"));
    ok(own.run("chmod 4750 a.img:/big"));
    let used = |own: &Own| {
        let usage: Value = serde_json::from_str(&ok(own.run("filesystem usage --json a.img"))).unwrap();
        let groups = usage["groups"].as_array().unwrap();
        groups.iter().find(|group| group["type"] == "Data").unwrap()["used"].as_u64().unwrap()
    };
    let before = used(&own);
    ok(own.run("mv a.img:/big a.img:/s"));
    assert!(used(&own).abs_diff(before) < 1 << 20, "{} {before}", used(&own));
    assert_eq!(ok(own.run("cat a.img:/s/big")).len(), 20 << 20);
    assert!(ok(own.run("ls -l a.img:/s/big")).contains("-rwsr-x---"));
    refused(&own.run("stat a.img:/big"), &["no such file"]);
    own.check();
}

#[test]
fn a_move_that_fails_leaves_the_source_as_it_was() {
    let own = Own::new();
    for (nr, name) in ["one", "two", "three"].iter().enumerate() {
        fs::write(own.0.path().join(name), vec![nr as u8; 1 << 20]).unwrap();
        ok(own.run(&format!("cp {name} a.img:/{name}")));
    }
    ok(own.run("mkdir a.img:/big a.img:/s/to"));
    ok(own.run("mv a.img:/one a.img:/two a.img:/three a.img:/big"));
    ok(own.run("quota enable a.img"));
    ok(own.run("qgroup limit 1M a.img:/s"));
    let before = ok(own.run("find --json a.img:/big a.img:/s"));
    for line in ["mv a.img:/big a.img:/s", "mv -T a.img:/big a.img:/s/to", "mv a.img:/big/one a.img:/s/f"] {
        let output = own.run(line);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert!(said.contains("cannot move a.img:/big") && said.contains("uota"), "{line}: {said}");
        assert!(!said.contains(".ubtrfs"), "{line}: {said}");
        let after = ok(own.run("find --json a.img:/big a.img:/s"));
        let names = |list: &str| -> Vec<String> {
            let paths = list.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            paths.map(|file| format!("{} {} {}", file["path"], file["inode"], file["size"])).collect()
        };
        assert_eq!(names(&after), names(&before), "{line}");
    }
    ok(own.run("quota disable a.img"));
    ok(own.run("mv a.img:/big a.img:/s"));
    assert_eq!(ok(own.run("find a.img:/s/big --type f")).lines().count(), 3);
    own.check();
}

#[test]
fn paths_in_an_image_do_not_lead_to_the_host() {
    let own = Own::new();
    let outside = own.0.path().join("outside");
    fs::write(&outside, "outside").unwrap();
    let before = fs::metadata(&outside).unwrap();
    ok(own.run(&format!("ln -s {} a.img:/out", outside.display())));
    ok(own.run("ln -s ../../../../../../d a.img:/s/up"));
    for line in ["chmod 777 a.img:/out", "chown 5 a.img:/out", "touch a.img:/out", "truncate -s 0 a.img:/out"] {
        assert_eq!(own.run(line).status.code(), Some(1), "{line}");
    }
    ok(own.run("touch a.img:/s/up/../made a.img:/../../../../up"));
    ok(own.run("mv a.img:/s/up/g a.img:/s/../../../x"));
    assert_eq!(ok(own.run("cat a.img:/x")), "content of g");
    assert_eq!(ok(own.run("ls a.img")), "d\nf\nmade\nout\nro\ns\nup\nx\n");
    let after = fs::metadata(&outside).unwrap();
    assert_eq!(
        (after.len(), after.modified().unwrap(), after.permissions()),
        (7, before.modified().unwrap(), before.permissions())
    );
    own.check();
}
