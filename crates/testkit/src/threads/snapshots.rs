//! The thread that makes and deletes snapshots, inside their sources and elsewhere.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Result, ensure};
use ubtrfs_format::RootId;

use super::{SNAPSHOT_LANE, Scenario, Shared};
use crate::faults::caught;
use crate::target::{NOSPC, Target};
use crate::{FaultDevice, FsTarget, LANES, RecordingDevice, Rng};

/// A snapshot, and the promises about it.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    /// Path of the snapshot.
    pub(super) path: String,
    /// For each lane, the first and the last state that the snapshot may contain.
    pub(super) states: [(usize, usize); LANES],
    /// The number of the promise that the snapshot exists (T2).
    pub(super) made: u64,
    /// The number of the last promise before the deletion began.
    pub(super) deleted: Option<u64>,
    /// The number of the promise that the deleted snapshot is gone (T2).
    pub(super) gone: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Snapshots {
    target: FsTarget,
    marks: Option<Arc<RecordingDevice>>,
    faults: Option<Arc<FaultDevice>>,
    nr_dirs: usize,
    wanted: usize,
    may_be_full: bool,
    rng: Rng,
    promises: u64,
    made: Vec<Snapshot>,
}

impl Snapshots {
    pub(super) fn new(
        target: FsTarget,
        marks: Option<Arc<RecordingDevice>>,
        faults: Option<Arc<FaultDevice>>,
        scenario: &Scenario,
        seed: u64,
    ) -> Self {
        let (nr_dirs, wanted) = (scenario.ballast.0, scenario.snapshots);
        let may_be_full = scenario.free.is_some();
        Self {
            target,
            marks,
            faults,
            nr_dirs,
            wanted,
            may_be_full,
            rng: Rng::new(!seed),
            promises: 0,
            made: Vec::new(),
        }
    }

    /// Makes and deletes snapshots. Returns all snapshots, the number of promises, and whether a fault was reported.
    pub(super) fn run(mut self, shared: &Shared) -> Result<(Vec<Snapshot>, u64, bool)> {
        for number in 0..self.wanted * 2 {
            let alive: Vec<usize> = (0..self.made.len()).filter(|at| self.made[*at].deleted.is_none()).collect();
            let done = match self.rng.below(6) {
                0 | 1 if alive.len() > 1 => {
                    let at = *self.rng.pick(&alive);
                    caught(|| self.delete(at))
                }
                _ if alive.len() > self.wanted / 2 => caught(|| self.delete(alive[0])),
                2 => caught(|| self.settle()),
                _ => {
                    // Change some leaves, so that the snapshot is made from dirty leaves.
                    for _ in 0..self.rng.below(4) {
                        let dir = self.rng.index(self.nr_dirs);
                        let time = (self.rng.below(1 << 30) as i64, 0);
                        let _may_fail_after_a_fault =
                            caught(|| self.target.set_mtime(format!("ballast/dir-{dir}").as_bytes(), time));
                    }
                    let of = alive.get(self.rng.index(4 * alive.len())).copied();
                    caught(|| self.make(number, of, shared))
                }
            };
            match done {
                Some(Ok(())) => {}
                failed => {
                    let text = failed.and_then(Result::err).map_or_else(String::new, |error| format!("{error:#}"));
                    let has_fault = self.faults.as_ref().is_some_and(|faults| faults.faults() > 0);
                    ensure!(has_fault, "a snapshot's making or deletion fails without a fault: {text}");
                    return Ok((self.made, self.promises, true));
                }
            }
        }
        Ok((self.made, self.promises, false))
    }

    fn promised(&mut self) {
        self.promises += 1;
        if let Some(marks) = &self.marks {
            marks.mark_lane(SNAPSHOT_LANE, self.promises);
        }
    }

    /// Makes a snapshot of the snapshot with index `of`, or of the top level if `of` is `None`.
    fn make(&mut self, number: usize, of: Option<usize>, shared: &Shared) -> Result<()> {
        let fs = Arc::clone(self.target.fs());
        let name = format!("snapshot-{number}-{}", "x".repeat(self.rng.index(120)));
        let dir = match self.rng.below(4) {
            0 => String::new(),
            _ => format!("ballast/dir-{}", self.rng.index(self.nr_dirs)),
        };
        let parent = self.target.lookup(dir.as_bytes()).map_err(super::errno)?.id;
        let load = || std::array::from_fn(|lane| shared.states[lane].load(Ordering::SeqCst));
        let before: [usize; LANES] = load();
        let source = match of {
            Some(of) => self.target.lookup(self.made[of].path.as_bytes()).map_err(super::errno)?.id.root,
            None => RootId::FS_TREE,
        };
        let path = if dir.is_empty() { name.clone() } else { format!("{dir}/{name}") };
        // Add the snapshot to the list before its creation: it may exist even if the creation fails or the power is cut
        // during the creation.
        let never = (0, usize::MAX - 1);
        self.made.push(Snapshot { path, states: [never; LANES], made: u64::MAX, deleted: None, gone: None });
        match fs.snapshot(source, parent, name.as_bytes(), self.rng.one_in(2)) {
            Ok(_) => {}
            // T9
            Err(error) if self.may_be_full && error.errno() == NOSPC => {
                self.made.pop();
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        let after: [usize; LANES] = load();
        let states = match of {
            Some(of) => self.made[of].states,
            // The snapshot may include an operation in progress, whose state is not recorded yet.
            None => std::array::from_fn(|lane| (before[lane], after[lane] + 1)),
        };
        let made = self.promises + 1;
        if let Some(last) = self.made.last_mut() {
            (last.states, last.made) = (states, made);
        }
        self.promised();
        Ok(())
    }

    fn delete(&mut self, at: usize) -> Result<()> {
        self.made[at].deleted = Some(self.promises);
        let path = self.made[at].path.clone();
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", &path));
        let parent = self.target.lookup(dir.as_bytes()).map_err(super::errno)?.id;
        self.target.fs().delete_subvolume(parent, name.as_bytes(), None)?;
        if self.rng.one_in(3) { self.settle() } else { Ok(()) }
    }

    /// Makes all deletions durable.
    fn settle(&mut self) -> Result<()> {
        if self.rng.one_in(2) {
            self.target.fs().finish_deletions(&mut |_| Ok(()))?;
        }
        self.target.fs().sync()?;
        let made = self.promises + 1;
        for snapshot in self.made.iter_mut().filter(|snapshot| snapshot.deleted.is_some()) {
            snapshot.gone.get_or_insert(made);
        }
        self.promised();
        Ok(())
    }
}
