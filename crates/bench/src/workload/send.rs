//! send and receive: measure sending snapshots into `/dev/null`, and receiving streams of snapshots.
//!
//! `prepare` makes snapshots of a subvolume:
//!
//! | `--of`    | subvolume                                    | changes before the next snapshot                              |
//! |-----------|----------------------------------------------|---------------------------------------------------------------|
//! | tree      | an unpacked archive                          | some percent of the files written, renamed, removed and added |
//! | database  | one file, written from start to end          | random overwrites (`--ops`)                                   |
//! | snapshots | an unpacked archive, `--ops` snapshots of it | three files                                                   |
//!
//! Without `--incremental`, only the first snapshot is sent, and it is sent whole. With `--incremental`, only the
//! second snapshot is sent, as the difference to the first snapshot. The content `snapshots` is a chain: the first
//! snapshot is sent whole, and each later snapshot as the difference to its predecessor. With `--incremental`, the
//! first snapshot is not sent.
//!
//! For `receive`, each side makes its streams itself, in one file, and receives them next to the snapshots. The parents
//! are on the same filesystem, so the receiver finds them by their own UUIDs, not by received UUIDs.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use super::{Params, data, untar};
use crate::machine;
use crate::record::MeasuredWork;
use crate::rng::Rng;
use crate::target::{BenchTarget, EntryKind};

/// The content of the snapshots that are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SentContent {
    /// A source tree
    Tree,
    /// A file that is overwritten at random places
    Database,
    /// Many snapshots of a source tree
    Snapshots,
}

const TREE: &[u8] = b"live";
const RECEIVED: &[u8] = b"received";

fn snapshot_name(number: u64) -> Vec<u8> {
    format!("s{number}").into_bytes()
}

fn nr_snapshots(params: &Params) -> u64 {
    match params.of {
        SentContent::Snapshots => params.ops.max(2),
        SentContent::Tree | SentContent::Database => 2,
    }
}

/// The snapshots to send, each with its parent.
fn plan(params: &Params) -> Vec<(u64, Option<u64>)> {
    let first = (0, None);
    match (params.of, params.incremental) {
        (SentContent::Snapshots, is_incremental) => {
            let rest = (1..nr_snapshots(params)).map(|number| (number, Some(number - 1)));
            (!is_incremental).then_some(first).into_iter().chain(rest).collect()
        }
        (_, true) => vec![(1, Some(0))],
        (_, false) => vec![first],
    }
}

pub(super) fn prepare_send<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<()> {
    let tree = target.make_subvolume(base, TREE)?;
    match params.of {
        SentContent::Database => data::seqwrite(target, &Params { threads: 1, ..params.clone() }, &tree).map(drop)?,
        SentContent::Tree | SentContent::Snapshots => untar::measure(target, params, &tree).map(drop)?,
    }
    for number in 0..nr_snapshots(params) {
        if number > 0 {
            match params.of {
                SentContent::Tree => change_tree(target, params, &tree)?,
                SentContent::Database => data::overwrite_some(target, params, &tree)?,
                SentContent::Snapshots => change_little(target, number, &tree)?,
            }
        }
        target.sync()?;
        target.snapshot(base, TREE, &snapshot_name(number))?;
    }
    Ok(())
}

pub(super) fn prepare_receive<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<()> {
    prepare_send(target, params, base)?;
    target.mkdir(base, RECEIVED, 0o755)?;
    let stream = stream(params)?;
    std::fs::write(stream, b"").with_context(|| format!("cannot write {}", stream.display()))?;
    send_all(target, params, base, stream)
}

pub(super) fn send<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    let mut work = MeasuredWork::new();
    let started = Instant::now();
    send_all(target, params, base, Path::new("/dev/null"))?;
    work.timed = Some(started.elapsed());
    work.ops = plan(params).len() as u64;
    Ok(work)
}

pub(super) fn receive<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    let stream = stream(params)?;
    machine::read_into_cache(stream)?;
    let into = target.child(base, RECEIVED)?;
    let mut work = MeasuredWork::new();
    let started = Instant::now();
    target.receive(&into, stream)?;
    target.sync()?;
    work.timed = Some(started.elapsed());
    work.ops = plan(params).len() as u64;
    work.bytes = std::fs::metadata(stream)?.len();
    Ok(work)
}

/// Removes the subvolumes: [`super::remove_all`] cannot empty those that are read-only.
pub(super) fn clean<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir, has_received: bool) -> Result<()> {
    if has_received {
        let into = target.child(base, RECEIVED)?;
        for (number, _) in plan(params) {
            target.delete_subvolume(&into, &snapshot_name(number))?;
        }
    }
    for number in 0..nr_snapshots(params) {
        target.delete_subvolume(base, &snapshot_name(number))?;
    }
    target.delete_subvolume(base, TREE)
}

fn stream(params: &Params) -> Result<&Path> {
    params.stream.as_deref().context("no place for the stream was given; use --stream FILE")
}

/// Sends the snapshots of the plan, and appends their streams to a file.
fn send_all<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir, output: &Path) -> Result<()> {
    for (number, parent) in plan(params) {
        let parent = parent.map(snapshot_name);
        target.send(base, &snapshot_name(number), parent.as_deref(), output)?;
    }
    Ok(())
}

/// Changes random files of a tree. On average, of 200 files 5 are written, 1 is renamed and 1 is removed; in addition,
/// 1 new file is made.
fn change_tree<T: BenchTarget>(target: &T, params: &Params, tree: &T::Dir) -> Result<()> {
    let mut rng = Rng::new(params.seed);
    let mut dirs = vec![tree.clone()];
    while let Some(dir) = dirs.pop() {
        for (name, kind) in target.list(&dir)? {
            if kind == EntryKind::Dir {
                dirs.push(target.child(&dir, &name)?);
                continue;
            }
            let named = |prefix: &[u8]| [prefix, &name].concat();
            match rng.below(200) {
                // A symbolic link cannot be opened, so it stays unchanged.
                0..=4 => match target.open(&dir, &name, true) {
                    Ok(file) => target.write(&file, 0, b"changed")?,
                    Err(_) => continue,
                },
                5 => target.rename(&dir, &name, &named(b"renamed-"))?,
                6 => target.unlink(&dir, &name)?,
                7 => target.write(&target.create(&dir, &named(b"new-"), 0o644)?, 0, &[7; 5000])?,
                _ => {}
            }
        }
    }
    Ok(())
}

fn change_little<T: BenchTarget>(target: &T, number: u64, tree: &T::Dir) -> Result<()> {
    for index in 0..3 {
        let file = target.create(tree, format!("new-{number}-{index}").as_bytes(), 0o644)?;
        target.write(&file, 0, &[7; 5000])?;
    }
    Ok(())
}
