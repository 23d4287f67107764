//! Runs the shell commands of README.md and docs/guide in a scratch directory.
//!
//! A block marked `sh` runs everywhere; a block marked `sh fuse` needs FUSE. The blocks of one document run in order, in
//! one directory, which has a directory `src` with some files. A document with a command that fails fails the test.
//! Blocks marked `console` are not run: they need root, a device, or much time.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ubtrfs_testkit::capability;

/// A block of shell commands in a document.
struct Block {
    needs_fuse: bool,
    /// Number of the block's first line in the document.
    line: usize,
    commands: String,
}

/// Returns the blocks that are marked `sh`.
fn blocks(text: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut open = None;
    for (number, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(mark), None) => open = Some((mark == "sh" || mark.starts_with("sh "), mark.ends_with(" fuse"))),
            (Some(_), Some(_)) => open = None,
            (None, Some((true, needs_fuse))) => match found.last_mut() {
                Some(block) if block.line + block.commands.lines().count() == number + 1 => {
                    block.commands.push_str(line);
                    block.commands.push('\n');
                }
                _ => {
                    let commands = format!("{line}\n");
                    found.push(Block { needs_fuse: *needs_fuse, line: number + 1, commands });
                }
            },
            _ => {}
        }
    }
    found
}

/// The scratch directory of a document. Unmounts what a failed block left mounted.
struct Bed(tempfile::TempDir);

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("src")).unwrap();
        fs::write(dir.path().join("src/main.rs"), "fn main() {}\n").unwrap();
        fs::write(dir.path().join("src/data"), vec![7; 300_000]).unwrap();
        Self(dir)
    }

    /// Runs a block. Returns its output if a command fails.
    fn run(&self, block: &Block) -> Result<(), String> {
        let bin = Path::new(env!("CARGO_BIN_EXE_ubtrfs")).parent().unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        let output = Command::new("timeout")
            .args(["-k", "5", "300", "sh", "-euc", &block.commands])
            .env("PATH", format!("{}:{path}", bin.display()))
            .env("LC_ALL", "C")
            .current_dir(self.0.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        if output.status.success() {
            return Ok(());
        }
        Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)))
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let dirs = mounts.lines().filter_map(|line| line.split(' ').nth(4));
        for dir in dirs.filter(|dir| Path::new(dir).starts_with(self.0.path())) {
            let _ = Command::new(env!("CARGO_BIN_EXE_ubtrfs")).args(["umount", dir]).status();
        }
    }
}

/// README.md, and the pages of the guide.
fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let pages = fs::read_dir(root.join("docs/guide")).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = pages.chain([root.join("README.md")]).collect();
    found.sort();
    found
}

#[test]
fn the_commands_of_the_readme_and_the_guide_work() {
    let fuse = capability::fuse();
    let mut failed = Vec::new();
    let mut nr_run = 0;
    for document in documents() {
        let bed = Bed::new();
        for block in blocks(&fs::read_to_string(&document).unwrap()) {
            if block.needs_fuse && !fuse {
                continue;
            }
            nr_run += 1;
            if let Err(why) = bed.run(&block) {
                failed.push(format!("{}:{}: {why}", document.display(), block.line));
                break;
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(nr_run > 10, "only {nr_run} blocks were found");
}

#[test]
fn only_blocks_marked_as_shell_are_run() {
    let found = blocks("a\n```sh\none\ntwo\n```\n```console\n$ no\n```\n```sh fuse\nthree\n```\n```\nno\n```\n");
    let found: Vec<_> = found.iter().map(|block| (block.needs_fuse, block.line, block.commands.as_str())).collect();
    assert_eq!(found, [(false, 3, "one\ntwo\n"), (true, 10, "three\n")]);
}
