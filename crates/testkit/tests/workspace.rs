//! Checks the rules of the workspace with `cargo metadata` and the sources: dependencies, licences, file sizes, and
//! where unsafe is allowed.
//!
//! I1. A crate uses only the crates that [`LAYERS`] lists for it. Dev-dependencies are not restricted.
//! I2. A folder of a crate imports only from the folders before it in [`FOLDERS`].
//! I3. A folder calls methods of its crate's main type only from the folders before it ([`calls`]).
//! I4. Everything that ships is permissively licensed, so no dependency forces another licence on users.
//! I5. A type has a name of its own ([`names`]).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

#[path = "workspace/calls.rs"]
mod calls;

#[path = "workspace/names.rs"]
mod names;

/// Each crate of the workspace, and the crates that it may use.
const LAYERS: &[(&str, &[&str])] = &[
    ("ubtrfs-format", &[]),
    ("ubtrfs-stream", &["ubtrfs-format"]),
    ("ubtrfs-error", &["ubtrfs-format"]),
    ("ubtrfs-nbd", &["ubtrfs-format"]),
    ("ubtrfs-device", &["ubtrfs-format", "ubtrfs-nbd"]),
    ("ubtrfs-volumes", &["ubtrfs-format", "ubtrfs-error", "ubtrfs-device"]),
    ("ubtrfs-tree", &["ubtrfs-format", "ubtrfs-error"]),
    ("ubtrfs-space", &["ubtrfs-format", "ubtrfs-error"]),
    ("ubtrfs-mkfs", &["ubtrfs-format", "ubtrfs-error", "ubtrfs-device", "ubtrfs-volumes"]),
    ("ubtrfs-check", &["ubtrfs-format", "ubtrfs-error", "ubtrfs-device"]),
    (
        "ubtrfs-transaction",
        &["ubtrfs-format", "ubtrfs-error", "ubtrfs-device", "ubtrfs-volumes", "ubtrfs-tree", "ubtrfs-space"],
    ),
    (
        "ubtrfs-fs",
        &[
            "ubtrfs-format",
            "ubtrfs-stream",
            "ubtrfs-error",
            "ubtrfs-device",
            "ubtrfs-volumes",
            "ubtrfs-tree",
            "ubtrfs-space",
            "ubtrfs-transaction",
        ],
    ),
    ("ubtrfs-remote", &[]),
    (
        "ubtrfs-control",
        &["ubtrfs-format", "ubtrfs-stream", "ubtrfs-error", "ubtrfs-device", "ubtrfs-transaction", "ubtrfs-fs"],
    ),
    ("ubtrfs-archive", &["ubtrfs-format", "ubtrfs-error", "ubtrfs-device", "ubtrfs-fs", "ubtrfs-control"]),
    (
        "ubtrfs-fuse",
        &["ubtrfs-format", "ubtrfs-error", "ubtrfs-device", "ubtrfs-transaction", "ubtrfs-fs", "ubtrfs-control"],
    ),
    (
        "ubtrfs",
        &[
            "ubtrfs-format",
            "ubtrfs-error",
            "ubtrfs-device",
            "ubtrfs-fs",
            "ubtrfs-archive",
            "ubtrfs-mkfs",
            "ubtrfs-check",
            "ubtrfs-fuse",
        ],
    ),
    (
        "ubtrfs-cli",
        &[
            "ubtrfs-archive",
            "ubtrfs-format",
            "ubtrfs-stream",
            "ubtrfs-error",
            "ubtrfs-device",
            "ubtrfs-volumes",
            "ubtrfs-tree",
            "ubtrfs-transaction",
            "ubtrfs-fs",
            "ubtrfs-mkfs",
            "ubtrfs-check",
            "ubtrfs-control",
            "ubtrfs-fuse",
            "ubtrfs-remote",
        ],
    ),
    ("ubtrfs-btrfsutil", &["ubtrfs-format", "ubtrfs-fs", "ubtrfs-control"]),
    ("ubtrfs-python", &["ubtrfs"]),
    ("ubtrfs-capi", &["ubtrfs"]),
    ("ubtrfs-bench", &["ubtrfs-format", "ubtrfs-device", "ubtrfs-mkfs", "ubtrfs-fs", "ubtrfs-control", "ubtrfs-fuse"]),
    (
        "ubtrfs-testkit",
        &["ubtrfs-format", "ubtrfs-stream", "ubtrfs-nbd", "ubtrfs-device", "ubtrfs-mkfs", "ubtrfs-check", "ubtrfs-fs"],
    ),
];

/// Folders of a crate, from the bottom up. Every folder may import from a file outside of these folders; [`calls`]
/// finds the calls that go upward through such a file.
const FOLDERS: &[(&str, &[&str])] = &[
    (
        "fs",
        &[
            "session",
            "compression",
            "items",
            "inode",
            "writeback",
            "file",
            "namei",
            "subvolume",
            "devices",
            "balance",
            "mount",
            "receive",
            "send",
        ],
    ),
    (
        "transaction",
        &[
            "health",
            "nodes",
            "delayed",
            "handle",
            "extents",
            "backref",
            "qgroup",
            "cow",
            "roots",
            "relocation",
            "tree_log",
            "commit",
            "reservation",
            "durable",
            "moving",
            "devices",
        ],
    ),
];

/// SPDX licences that require no more than a notice.
const PERMISSIVE: &[&str] = &[
    "MIT",
    "MIT-0",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Zlib",
    "0BSD",
    "BSL-1.0",
    "CC0-1.0",
    "Unlicense",
    "Unicode-3.0",
    "Unicode-DFS-2016",
    "bzip2-1.0.6",
];

/// Crates with unsafe code: system calls, and the interface to C.
const UNSAFE: &[&str] = &["ubtrfs-device", "ubtrfs-btrfsutil", "ubtrfs-capi"];

/// A source file must have fewer lines than this before its tests.
const MAX_LINES: usize = 800;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn metadata(deps: bool) -> Value {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut command = Command::new(cargo);
    command.args(["metadata", "--format-version=1", "--locked", "--offline"]).current_dir(root());
    command.args(if deps { ["--filter-platform", "x86_64-unknown-linux-gnu"].as_slice() } else { &["--no-deps"] });
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().unwrap_or_default()
}

#[test]
fn crates_depend_only_downward() {
    let floors: BTreeMap<&str, &[&str]> = LAYERS.iter().copied().collect();
    let metadata = metadata(false);
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().unwrap() {
        let name = text(package, "name");
        let Some(allowed) = floors.get(name) else {
            wrong.push(format!("{name} has no floor; add it to LAYERS"));
            continue;
        };
        for dependency in package["dependencies"].as_array().unwrap() {
            let other = text(dependency, "name");
            let dev = text(dependency, "kind") == "dev";
            if other.starts_with("ubtrfs-") && !dev && !allowed.contains(&other) {
                wrong.push(format!("{name} may not depend on {other}"));
            }
        }
    }
    assert!(wrong.is_empty(), "layering:\n  {}", wrong.join("\n  "));
}

#[test]
fn folders_import_only_from_folders_below() {
    let sources = sources();
    let mut wrong = Vec::new();
    for (name, rooms) in FOLDERS {
        let src = Path::new("crates").join(name).join("src");
        let mut found = BTreeSet::new();
        for (path, text) in &sources {
            let Ok(below) = path.strip_prefix(&src) else { continue };
            let mut parts = below.iter().filter_map(|part| part.to_str());
            let (Some(room), Some(_)) = (parts.next(), parts.next()) else { continue };
            found.insert(room);
            let Some(floor) = rooms.iter().position(|other| *other == room) else { continue };
            for other in rooms[floor + 1..].iter().filter(|other| imports(text, other)) {
                wrong.push(format!("{}: imports from {other}, which lies above {room}", path.display()));
            }
        }
        let listed: BTreeSet<&str> = rooms.iter().copied().collect();
        assert_eq!(found, listed, "folders of {name} and FOLDERS");
    }
    assert!(wrong.is_empty(), "rooms:\n  {}", wrong.join("\n  "));
}

/// Whether the code of a source file, apart from its tests and comments, names the folder `room` of its crate.
fn imports(text: &str, room: &str) -> bool {
    let lines = text.lines().take_while(|line| *line != "#[cfg(test)]").map(str::trim_start);
    let code: String = lines.filter(|line| !line.starts_with("//")).collect::<Vec<_>>().join(" ");
    code.match_indices("crate::").any(|(at, found)| {
        let rest = &code[at + found.len()..];
        let names = match rest.strip_prefix('{') {
            Some(group) => group.split_once(';').map_or(group, |(group, _)| group),
            None => return rest.strip_prefix(room).is_some_and(|rest| rest.starts_with("::")),
        };
        names.split([',', ' ', '{', '}']).any(|name| name.strip_prefix(room).is_some_and(|rest| rest.starts_with("::")))
    })
}

#[test]
fn an_import_is_found_in_each_form() {
    for code in ["use crate::mount::fs::Fs;", "use crate::{Error, mount::fs};", "    crate::mount::now()"] {
        assert!(imports(code, "mount"), "{code}");
    }
    for code in ["// crate::mount::fs", "use crate::mounts::fs;", "#[cfg(test)]\nuse crate::mount::fs;", "mount::fs()"]
    {
        assert!(!imports(code, "mount"), "{code}");
    }
}

#[test]
fn dependencies_are_permissively_licensed() {
    let metadata = metadata(true);
    let used: BTreeSet<&str> =
        metadata["resolve"]["nodes"].as_array().unwrap().iter().map(|node| text(node, "id")).collect();
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().unwrap() {
        if !used.contains(text(package, "id")) {
            continue;
        }
        let (name, license) = (text(package, "name"), text(package, "license"));
        if !permissive(license) {
            wrong.push(format!("{name}: '{license}'"));
        }
        let source = package["source"].as_str();
        if source.is_some_and(|source| !source.starts_with("registry+https://github.com/rust-lang/crates.io-index")) {
            wrong.push(format!("{name}: from {source:?}, not from crates.io"));
        }
    }
    assert!(wrong.is_empty(), "licences:\n  {}", wrong.join("\n  "));
}

/// Whether permissive licences alone satisfy an SPDX expression. Old manifests write `/` for OR.
fn permissive(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    !tokens.is_empty() && any_of(&tokens, &mut at) && at == tokens.len()
}

fn any_of(tokens: &[&str], at: &mut usize) -> bool {
    let mut result = all_of(tokens, at);
    while tokens.get(*at) == Some(&"OR") {
        *at += 1;
        result |= all_of(tokens, at);
    }
    result
}

fn all_of(tokens: &[&str], at: &mut usize) -> bool {
    let mut result = one(tokens, at);
    while tokens.get(*at) == Some(&"AND") {
        *at += 1;
        result &= one(tokens, at);
    }
    result
}

fn one(tokens: &[&str], at: &mut usize) -> bool {
    let token = tokens.get(*at).copied().unwrap_or_default();
    *at += 1;
    if token == "(" {
        let result = any_of(tokens, at);
        let closed = tokens.get(*at) == Some(&")");
        *at += 1;
        return result && closed;
    }
    // An exception (`WITH`) only adds permissions to a licence.
    if tokens.get(*at) == Some(&"WITH") {
        *at += 2;
    }
    PERMISSIVE.contains(&token)
}

#[test]
fn licence_expressions_are_understood() {
    for good in [
        "MIT",
        "MIT OR GPL-2.0",
        "MIT/Apache-2.0",
        "(MIT OR Apache-2.0) AND Unicode-3.0",
        "Apache-2.0 WITH LLVM-exception",
    ] {
        assert!(permissive(good), "{good}");
    }
    for bad in ["", "GPL-2.0-only", "MIT AND GPL-3.0", "LGPL-2.1-or-later", "(MIT OR ISC) AND MPL-2.0"] {
        assert!(!permissive(bad), "{bad}");
    }
}

fn sources() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut stack = vec![root().join("crates")];
    while let Some(dir) = stack.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                stack.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path.strip_prefix(root()).unwrap().to_owned(), text));
            }
        }
    }
    assert!(found.len() > 20, "the sources were not found");
    found
}

#[test]
fn every_source_file_opens_with_its_purpose_and_has_a_readable_size() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        if !text.starts_with("//!") {
            wrong.push(format!("{}: does not open with //!", path.display()));
        }
        let lines = text.lines().take_while(|line| *line != "#[cfg(test)]").count();
        if lines >= MAX_LINES {
            wrong.push(format!("{}: {lines} lines before its tests", path.display()));
        }
    }
    assert!(wrong.is_empty(), "sources:\n  {}", wrong.join("\n  "));
}

/// A test that cannot run prints "SKIPPED" and asserts that it does not run in CI, where nothing may be skipped.
#[test]
fn nothing_is_skipped_silently_in_ci() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        let lines: Vec<&str> = text.lines().collect();
        for (number, _) in lines.iter().enumerate().filter(|(_, line)| line.contains("eprintln!(\"SKIPPED")) {
            let near = &lines[number.saturating_sub(4)..lines.len().min(number + 3)];
            let asserts = near.iter().any(|line| line.contains("assert!(") && line.contains("CI"));
            if !asserts {
                wrong.push(format!("{}:{}: no assertion that this is not CI", path.display(), number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "skipped silently:\n  {}", wrong.join("\n  "));
}

#[test]
fn unsafe_code_is_only_for_system_calls_and_c() {
    let mut wrong = Vec::new();
    for package in metadata(false)["packages"].as_array().unwrap() {
        let name = text(package, "name");
        for target in package["targets"].as_array().unwrap() {
            let kinds = &target["kind"];
            let shipped =
                kinds.as_array().unwrap().iter().any(|kind| kind == "lib" || kind == "cdylib" || kind == "bin");
            let source = fs::read_to_string(text(target, "src_path")).unwrap();
            if shipped && !UNSAFE.contains(&name) && !source.contains("#![forbid(unsafe_code)]") {
                wrong.push(format!("{}: no #![forbid(unsafe_code)]", text(target, "src_path")));
            }
        }
    }
    assert!(wrong.is_empty(), "unsafe:\n  {}", wrong.join("\n  "));
}

/// A test that runs cargo with its own environment has crates built again (`ubtrfs_testkit::build_example`).
#[test]
fn cargo_runs_in_one_place() {
    let runs = |text: &str| text.contains("(\"CARGO\")") || text.contains("new(\"cargo\")");
    let is_allowed =
        |path: &Path| path.ends_with("testkit/src/command.rs") || path.ends_with("testkit/tests/workspace.rs");
    let wrong: Vec<PathBuf> =
        sources().into_iter().filter(|(path, text)| runs(text) && !is_allowed(path)).map(|(path, _)| path).collect();
    assert!(wrong.is_empty(), "use ubtrfs_testkit::build_example: {wrong:?}");
}

#[test]
fn every_crate_takes_the_workspaces_lints() {
    for package in metadata(false)["packages"].as_array().unwrap() {
        let manifest = fs::read_to_string(text(package, "manifest_path")).unwrap();
        assert!(manifest.contains("[lints]\nworkspace = true"), "{}", text(package, "name"));
        assert_eq!(text(package, "license"), "MIT OR Apache-2.0", "{}", text(package, "name"));
    }
}
