//! `ubtrfs diff` of trees in images.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::Value;
use tempfile::TempDir;

use crate::common::{ok, ubtrfs};

/// Two images with equal trees.
struct Pair(TempDir);

impl Pair {
    fn new() -> Self {
        let dir = TempDir::with_prefix("ubtrfs-diff-").unwrap();
        let pair = Self(dir);
        let tree = pair.0.path().join("tree");
        fs::create_dir_all(tree.join("d/sub")).unwrap();
        for (name, content) in [("d/f", "content"), ("d/g", "other"), ("d/sub/x", "x"), ("z", "")] {
            fs::write(tree.join(name), content).unwrap();
        }
        std::os::unix::fs::symlink("d/f", tree.join("link")).unwrap();
        fs::write(tree.join("large"), vec![1; 3 << 20]).unwrap();
        ok(ubtrfs(["mkfs", "-q", "-b", "256M", "-r", &pair.at("tree"), &pair.at("a.img")]));
        pair.run("subvolume create a.img:/vol");
        fs::copy(pair.at("a.img"), pair.at("b.img")).unwrap();
        pair
    }

    fn at(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// Runs a command with the names of files completed.
    fn command(&self, line: &str) -> Output {
        let complete = |word: &str| match word.contains(".img") {
            true => self.at(word),
            false => word.to_owned(),
        };
        ubtrfs(line.split(' ').map(complete))
    }

    fn run(&self, line: &str) {
        ok(self.command(line));
    }

    /// What `diff` prints.
    fn diff(&self, arguments: &str) -> String {
        let output = self.command(&format!("diff {arguments}"));
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(i32::from(!text.is_empty())), "{arguments}: {text}");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        text
    }
}

#[test]
fn equal_trees_have_no_difference() {
    let pair = Pair::new();
    assert_eq!(pair.diff("a.img b.img"), "");
    assert_eq!(pair.diff("a.img:/d a.img:/d"), "");
    pair.run("subvolume snapshot a.img:/ a.img:/vol/snapshot");
    assert_eq!(pair.diff("a.img:/d a.img:/vol/snapshot/d"), "");
    // Holes have the content of zeros.
    pair.run("truncate -s 1M a.img:/zeros");
    fs::write(Path::new(&pair.at("zeros")), vec![0; 1 << 20]).unwrap();
    ok(ubtrfs(["cp", &pair.at("zeros"), &format!("{}:/zeros", pair.at("b.img"))]));
    assert_eq!(pair.diff("--ignore mtime,mode a.img:/zeros b.img:/zeros"), "");
}

#[test]
fn every_kind_of_difference_is_told() {
    let pair = Pair::new();
    let changes = [
        ("chmod 600 b.img:/d/f", "~ /d/f: mode rw-r--r-- -> rw-------\n"),
        ("chown 5:6 b.img:/d/g", "~ /d/g: owner 0:0 -> 5:6\n"),
        ("ln b.img:/z b.img:/d/z2", "+ /d/z2 (file)\n~ /z: links 1 -> 2\n"),
        ("setfattr -n user.a -v value b.img:/d/sub/x", "~ /d/sub/x: xattr user.a absent -> value\n"),
        ("touch -d 2026-11-21 b.img:/z", "mtime "),
        ("rm b.img:/link", "- /link (symlink)\n"),
        ("ln -s elsewhere b.img:/link", "~ /link: target d/f -> elsewhere\n"),
        ("truncate -s 5 b.img:/d/f", "size 7 -> 5"),
        ("mkdir b.img:/vol2", "+ /vol2 (directory)\n"),
        ("subvolume delete b.img:/vol", "- /vol (subvolume)\n"),
        ("mkdir b.img:/vol", "~ /vol: type subvolume -> directory"),
    ];
    for (change, wanted) in changes {
        pair.run(change);
        let ignore = if wanted == "mtime " { "" } else { "--ignore mtime " };
        let told = pair.diff(&format!("{ignore}a.img b.img"));
        assert!(wanted.lines().all(|line| told.contains(line)), "{change}: {told}");
    }
    // One byte of a large file.
    let mut large = vec![1; 3 << 20];
    large[2_500_000] = 2;
    fs::write(pair.at("large"), large).unwrap();
    ok(ubtrfs(["cp", &pair.at("large"), &format!("{}:/large", pair.at("b.img"))]));
    assert_eq!(pair.diff("--ignore mtime a.img:/large b.img:/large"), "~ /: content from byte 2500000\n");
    assert_eq!(pair.diff("--ignore mtime,content a.img:/large b.img:/large"), "");
    // A directory beside a file.
    assert!(pair.diff("a.img:/d b.img:/z").starts_with("~ /: type directory -> file"));
}

#[test]
fn differences_are_told_as_json() {
    let pair = Pair::new();
    pair.run("rm b.img:/d/f");
    pair.run("setfattr -n user.a -v value b.img:/d/g");
    let text = pair.diff("--json --ignore mtime a.img b.img");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0], serde_json::json!({ "in": "first", "type": "file", "path": "/d/f" }));
    let difference = serde_json::json!({ "what": "xattr", "at": "user.a", "first": "absent", "second": "value" });
    assert_eq!(lines[1], serde_json::json!({ "in": "both", "differences": [difference], "path": "/d/g" }));
    assert_eq!(lines.len(), 2, "{text}");
}

#[test]
fn errors_have_a_status_of_their_own() {
    let pair = Pair::new();
    for (line, words) in [
        ("diff a.img:/missing b.img", ["a.img:/missing", "no such file"]),
        ("diff a.img missing.img", ["missing.img", "does not exist"]),
    ] {
        let output = pair.command(line);
        assert_eq!(output.status.code(), Some(2), "{line}: {output:?}");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(words.iter().all(|word| errors.contains(word)), "{line}: {errors}");
    }
}
