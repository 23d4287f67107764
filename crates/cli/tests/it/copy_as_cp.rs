//! Compares `ubtrfs cp` into an image with the machine's cp on a copy of the tree, with equal sources, options and
//! targets. Either both programs must succeed or both must fail, and the trees must be equal afterwards. Each case has
//! a separate directory, so all cases can share one image.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{ok, refused};
use ubtrfs_testkit::btrfs_check;

fn ubtrfs(args: &[&str], dir: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ubtrfs")).args(args).current_dir(dir).stdin(Stdio::null()).output().unwrap()
}

/// Kinds of symbolic links, each with its target.
const KINDS: [(&str, &str); 7] = [
    ("file", "real"),
    ("chain", "other"),
    ("dots", "rd/../real"),
    ("directory", "rd"),
    ("dangling", "nowhere"),
    ("dangling directory", "nowhere/x"),
    ("loop", "loop"),
];

const OPTIONS: [&str; 6] = ["", "-P", "-p", "-r", "-a", "-rP"];

/// Copies to test: the sources, and the target in the case's directory.
const COPIES: [(&[&str], &str); 9] = [
    (&["f"], "T"),
    (&["f"], "dst"),
    (&["f"], "plain"),
    (&["l"], "T"),
    (&["l"], "dst"),
    (&["d"], "T"),
    (&["d"], "dst"),
    (&["f", "l", "h1", "h2"], "dst"),
    (&["."], "dst"),
];

fn make_sources(dir: &Path) {
    fs::create_dir_all(dir.join("d")).unwrap();
    for name in ["f", "d/x", "h1"] {
        fs::write(dir.join(name), format!("new {name}")).unwrap();
    }
    fs::hard_link(dir.join("h1"), dir.join("h2")).unwrap();
    symlink("f", dir.join("l")).unwrap();
}

fn make_case(dir: &Path, target: &str) {
    fs::create_dir_all(dir.join("rd")).unwrap();
    fs::create_dir_all(dir.join("dst")).unwrap();
    for name in ["real", "plain"] {
        fs::write(dir.join(name), "old").unwrap();
        fs::set_permissions(dir.join(name), PermissionsExt::from_mode(0o640)).unwrap();
    }
    symlink("real", dir.join("other")).unwrap();
    symlink("loop", dir.join("loop")).unwrap();
    symlink(target, dir.join("T")).unwrap();
    for name in ["f", "l", "d", "h1", "h2"] {
        symlink(format!("../{target}"), dir.join("dst").join(name)).unwrap();
    }
}

/// Lists path, type, mode, link target and content, but no times.
fn listing(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut listed = BTreeMap::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(here) = todo.pop() {
        for entry in fs::read_dir(&here).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let content = match () {
                () if meta.is_dir() => {
                    todo.push(path.clone());
                    "directory".to_owned()
                }
                () if meta.is_symlink() => format!("link to {}", fs::read_link(&path).unwrap().display()),
                () => format!("{:o} {}", meta.mode(), fs::read_to_string(&path).unwrap()),
            };
            listed.insert(path.strip_prefix(dir).unwrap().to_owned(), content);
        }
    }
    listed
}

#[test]
fn a_copy_into_an_image_equals_a_copy_by_cp() {
    let dir = tempfile::tempdir().unwrap();
    let (sources, expected, out) = (dir.path().join("src"), dir.path().join("expected"), dir.path().join("out"));
    make_sources(&sources);
    let mut cases = Vec::new();
    for (kind, target) in KINDS {
        for options in OPTIONS {
            for (names, to) in COPIES {
                let case = format!("c{}", cases.len());
                make_case(&expected.join(&case), target);
                cases.push((case, kind, options, names, to));
            }
        }
    }
    let (expected_text, image) = (expected.display().to_string(), dir.path().join("a.img"));
    ok(ubtrfs(&["mkfs", "-q", "-r", &expected_text, &image.display().to_string()], dir.path()));
    let mut wrong = Vec::new();
    for (case, kind, options, names, to) in &cases {
        let options: Vec<&str> = options.split_whitespace().collect();
        let own = Command::new("cp")
            .args(&options)
            .args(*names)
            .arg(expected.join(case).join(to))
            .current_dir(&sources)
            .output()
            .unwrap();
        let target = format!("{}:/{case}/{to}", image.display());
        let ours = ubtrfs(&[&["cp"], &options[..], names, &[target.as_str()]].concat(), &sources);
        if own.status.success() != ours.status.success() {
            let text = |output: &Output| String::from_utf8_lossy(&output.stderr).trim().to_owned();
            wrong.push(format!("{kind}: cp {options:?} {names:?} {to}: cp: '{}', ours: '{}'", text(&own), text(&ours)));
        }
    }
    ok(ubtrfs(&["cp", "-a", &format!("{}:/", image.display()), &out.display().to_string()], dir.path()));
    for (case, kind, options, names, to) in &cases {
        let (cp, ours) = (listing(&expected.join(case)), listing(&out.join(case)));
        if cp != ours {
            let differ = cp.iter().filter(|(path, entry)| ours.get(*path) != Some(entry));
            let differ: Vec<_> = differ.map(|(path, entry)| (path, entry, ours.get(path))).collect();
            wrong.push(format!("{kind}: cp {options} {names:?} {to}: {differ:?}, {} and {}", cp.len(), ours.len()));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    ok(ubtrfs(&["check", "a.img"], dir.path()));
    btrfs_check(&image).unwrap();
}

#[test]
fn links_in_an_image_lead_no_further_than_its_root() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("etc")).unwrap();
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::write(root.join("etc/target"), "old").unwrap();
    symlink("/etc/target", root.join("a/absolute")).unwrap();
    symlink("../../../../../etc/target", root.join("a/b/dots")).unwrap();
    symlink("/a/b", root.join("way")).unwrap();
    symlink("way/../absolute", root.join("through")).unwrap();
    let outside = dir.path().join("outside");
    fs::write(&outside, "outside").unwrap();
    symlink(&outside, root.join("out")).unwrap();
    ok(ubtrfs(&["mkfs", "-q", "-r", "root", "a.img"], dir.path()));
    for link in ["a/absolute", "a/b/dots", "through", "way/dots"] {
        fs::write(dir.path().join("new"), format!("through {link}")).unwrap();
        ok(ubtrfs(&["cp", "new", &format!("a.img:/{link}")], dir.path()));
        assert_eq!(ok(ubtrfs(&["cat", "a.img:/etc/target"], dir.path())), format!("through {link}"));
    }
    refused(&ubtrfs(&["cp", "new", "a.img:/out"], dir.path()), &["leads nowhere"]);
    assert_eq!(fs::read_to_string(&outside).unwrap(), "outside");
    // A link that was copied from one source is not followed when another source is copied.
    for name in ["one", "two"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    symlink("/etc/target", dir.path().join("one/x")).unwrap();
    fs::write(dir.path().join("two/x"), "two").unwrap();
    refused(&ubtrfs(&["cp", "-r", "one/x", "two/x", "a.img:/a"], dir.path()), &["that this command copied"]);
    assert_eq!(ok(ubtrfs(&["cat", "a.img:/etc/target"], dir.path())), "through way/dots");
    // No temporary file remains beside the targets.
    ok(ubtrfs(&["cp", "-a", "a.img:/", "tree"], dir.path()));
    let tree = listing(&dir.path().join("tree"));
    assert!(!tree.keys().any(|path| path.to_string_lossy().contains(".ubtrfs")), "{tree:?}");
    ok(ubtrfs(&["check", "a.img"], dir.path()));
    btrfs_check(&dir.path().join("a.img")).unwrap();
}
