//! A lane: one thread that works in one directory.
//!
//! - I1. After each operation the lane's history has the state that the model predicts. Promises are marked on the
//!   device before the next operation.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Result, bail};

use super::{Scenario, Shared, errno};
use crate::faults::caught;
use crate::model::ROOT;
use crate::prefixed::Prefixed;
use crate::target::{Errno, FallocateOp, NOSPC, NodeKind, RenameOp, Target};
use crate::tree_entry::show;
use crate::{Driver, FaultDevice, FsTarget, History, Model, RecordingDevice, Rng};

/// The work of a lane.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// Continuously overwrites, truncates, punches, reflinks, replaces and fsyncs a few files.
    Busy { steps: usize },
    /// Works like `Busy`, but without fsyncs. Each step ends with a writeback of dirty data, if possible while another
    /// thread commits.
    Writeback { steps: usize },
    /// Makes random operations with [`Driver`], and fsyncs.
    Driver { steps: usize },
    /// Works like `Driver`, but without changes of file content.
    Names { steps: usize },
    /// Creates files until there is no space, removes files, and fsyncs.
    Fill { steps: usize },
}

/// A thread's directory and history.
#[derive(Debug)]
pub(super) struct Lane {
    number: usize,
    target: Prefixed<FsTarget>,
    history: History,
    marks: Option<Arc<RecordingDevice>>,
    faults: Option<Arc<FaultDevice>>,
    /// Whether a sync may report the error of an unwritable file, after making everything else durable (T4).
    syncs_may_fail: bool,
    may_be_full: bool,
    rng: Rng,
    told: bool,
    /// The operations done, each with the number of the state after it.
    steps: Vec<String>,
}

type Action<'a> = &'a dyn Fn(&mut dyn Target) -> Result<(), Errno>;
type BoxedAction = Box<dyn Fn(&mut dyn Target) -> Result<(), Errno>>;

/// The result of an operation.
enum Done {
    Fine,
    /// The operation failed for lack of space. The variant holds the model as it would be if the operation had
    /// succeeded.
    Full(Model),
    /// A fault was reported, so the lane ends.
    Told,
}

/// One operation of a busy lane.
struct Operation {
    what: String,
    /// The file that may be partly changed if there is no space.
    partly_changes: Option<Vec<u8>>,
    /// The operation; `None` means a sync.
    action: Option<BoxedAction>,
}

impl Operation {
    fn new(
        what: String,
        partly_changes: Option<&[u8]>,
        action: impl Fn(&mut dyn Target) -> Result<(), Errno> + 'static,
    ) -> Self {
        Self { what, partly_changes: partly_changes.map(<[u8]>::to_vec), action: Some(Box::new(action)) }
    }

    fn write(path: &[u8], at: u64, data: &Arc<[u8]>) -> Self {
        let (path, data) = (path.to_vec(), Arc::clone(data));
        let what = format!("write {} {at}+{}", show(&path), data.len());
        Self::new(what, Some(&path.clone()), move |to| to.write(&path, at, &data))
    }

    fn fsync(path: &[u8]) -> Self {
        let path = path.to_vec();
        Self::new(format!("fsync {}", show(&path)), None, move |to| to.fsync(&path))
    }
}

/// The longest time for which a writeback lane waits until the device delays a request.
const STOP_LIMIT: Duration = Duration::from_millis(20);

impl Lane {
    pub(super) fn new(
        number: usize,
        target: FsTarget,
        marks: Option<Arc<RecordingDevice>>,
        faults: Option<Arc<FaultDevice>>,
        scenario: &Scenario,
        seed: u64,
    ) -> Self {
        let rng = Rng::new(seed.wrapping_mul(31).wrapping_add(number as u64));
        let target = Prefixed::new(target, &format!("lane-{number}"));
        let history = History::new(Model::new());
        let (syncs_may_fail, may_be_full) = (scenario.poison, scenario.free.is_some());
        let (told, steps) = (false, Vec::new());
        Self { number, target, history, marks, faults, syncs_may_fail, may_be_full, rng, told, steps }
    }

    /// Performs all steps. Returns the history, the operations done, and whether a fault was reported.
    pub(super) fn run(mut self, work: Work, shared: &Shared) -> Result<(History, Vec<String>, bool)> {
        match work {
            Work::Busy { steps } => self.busy(steps, true, shared)?,
            Work::Writeback { steps } => self.busy(steps, false, shared)?,
            Work::Driver { steps } => self.random(steps, false, shared)?,
            Work::Names { steps } => self.random(steps, true, shared)?,
            Work::Fill { steps } => self.fill(steps, shared)?,
        }
        Ok((self.history, self.steps, self.told))
    }

    /// Adds the state after an operation to the history, and a promise for each sync and fsync of the operation (I1).
    fn note(&mut self, model: Model, shared: &Shared) {
        self.history.push(model);
        shared.states[self.number].store(self.history.last(), Ordering::SeqCst);
        for promise in std::mem::take(&mut self.target.fresh) {
            let made = match promise {
                None => self.history.sync(),
                Some(path) => self.history.fsync(&path),
            };
            if let Some(marks) = &self.marks {
                marks.mark_lane(self.number, made as u64);
            }
        }
    }

    /// Performs an operation on the filesystem and on the model.
    fn act(&mut self, what: &str, action: Action<'_>, shared: &Shared) -> Result<Done> {
        self.steps.push(format!("{}: {what}", self.history.last() + 1));
        let done = caught(|| action(&mut self.target));
        let mut model = self.history.model().clone();
        let on_model = action(&mut model);
        match done {
            Some(Ok(())) => {
                on_model.map_err(|number| errno(number).context(format!("{what}: the model refuses it")))?;
                self.note(model, shared);
                Ok(Done::Fine)
            }
            Some(Err(NOSPC)) if self.may_be_full && !must_have_space(what) => {
                self.target.fresh.clear();
                Ok(Done::Full(model))
            }
            failed => self.failed(what, failed.and_then(Result::err), model, shared),
        }
    }

    /// Handles an operation that failed. If a fault has happened, the operation may have taken effect nevertheless, and
    /// the lane ends. Otherwise returns an error.
    fn failed(&mut self, what: &str, number: Option<i32>, model: Model, shared: &Shared) -> Result<Done> {
        let has_fault = self.faults.as_ref().is_some_and(|faults| faults.faults() > 0);
        if !has_fault {
            let fs = self.target.inner.fs();
            bail!(
                "lane {}: {what} fails without a fault: errno {number:?}; {:?}; {:?}; {:?}",
                self.number,
                fs.statfs(),
                fs.balance_status(),
                fs.block_groups()
            );
        }
        self.target.fresh.clear();
        // The operation may or may not have taken effect, so a later snapshot may contain the state before or after it.
        let undone = self.history.last();
        self.note(model, shared);
        shared.states[self.number].store(undone, Ordering::SeqCst);
        self.told = true;
        Ok(Done::Told)
    }

    fn sync(&mut self, shared: &Shared) -> Result<Done> {
        if self.syncs_may_fail {
            if self.target.sync().is_err() {
                self.target.fresh.push(None);
            }
            self.note(self.history.model().clone(), shared);
            return Ok(Done::Fine);
        }
        self.act("sync", &|to| to.sync(), shared)
    }

    fn busy(&mut self, steps: usize, has_fsyncs: bool, shared: &Shared) -> Result<()> {
        for number in 0..steps {
            if !has_fsyncs && let Some(marks) = &self.marks {
                // Wait until the device delays a request, which usually means that a commit is in progress: this lane
                // tests writeback during a commit.
                marks.wait_for_stop(STOP_LIMIT);
            }
            let files: Vec<Vec<u8>> = self.history.model().nodes[&ROOT].children.keys().cloned().collect();
            for todo in self.next(number, &files, has_fsyncs) {
                let done = match &todo.action {
                    None => self.sync(shared)?,
                    Some(action) => self.act(&todo.what, &**action, shared)?,
                };
                match done {
                    Done::Fine => {}
                    Done::Told => return Ok(()),
                    Done::Full(model) => {
                        if let Some(path) = todo.partly_changes {
                            // The operation may have been done in part, so remove the file that it may have changed. A
                            // snapshot that is made before the removal may contain the state before or after the
                            // operation.
                            let undone = self.history.last();
                            self.note(model, shared);
                            shared.states[self.number].store(undone, Ordering::SeqCst);
                            if !matches!(self.act("unlink", &|to| to.unlink(&path), shared)?, Done::Fine) {
                                self.told = true;
                                return Ok(());
                            }
                        }
                        break;
                    }
                }
            }
            if !has_fsyncs && let Some(Err(error)) = caught(|| self.target.inner.fs().flush_data()) {
                drop(self.failed("flush", Some(error.errno()), self.history.model().clone(), shared)?);
            }
        }
        Ok(())
    }

    /// Returns the operations of the step with this number, in order.
    fn next(&mut self, number: usize, files: &[Vec<u8>], has_fsyncs: bool) -> Vec<Operation> {
        let rng = &mut self.rng;
        // Use small files if little space is free, so that freed space is soon reused.
        let scale = if self.may_be_full { 1 } else { 4 };
        let len = 1 + rng.index(8000 * scale);
        let data: Arc<[u8]> = if rng.one_in(4) { rng.text(len) } else { rng.bytes(len) }.into();
        let at = rng.below(2 * scale as u64) * 4096 + if rng.one_in(3) { rng.below(4096) } else { 0 };
        let choice = if files.len() < 2 { 0 } else { rng.below(20) };
        let index = rng.index(files.len().max(1));
        let path = files.get(index).cloned().unwrap_or_default();
        let new = |prefix: &str| {
            let path = format!("{prefix}-{number}").into_bytes();
            vec![
                Operation::new(format!("create {}", show(&path)), None, {
                    let path = path.clone();
                    move |to| to.create(&path, NodeKind::File, 0o644, (0, 0))
                }),
                Operation::write(&path, 0, &data),
                Operation::fsync(&path),
            ]
        };
        let mut todo = match choice {
            0 => new("file"),
            16..19 => {
                // Overwrite the whole file, so that its old extents are free after the next commit.
                let all: Arc<[u8]> = rng.bytes(17_000 * scale).into();
                vec![Operation::write(&path, 0, &all)]
            }
            19 if !has_fsyncs => {
                vec![Operation::new(format!("unlink {}", show(&path)), None, move |to| to.unlink(&path))]
            }
            1..5 => vec![Operation::write(&path, at, &data)],
            5 => vec![Operation::new(format!("truncate {} {at}", show(&path)), Some(&path.clone()), move |to| {
                to.truncate(&path, at)
            })],
            6 => vec![Operation::new(format!("punch {} {at}+16384", show(&path)), Some(&path.clone()), move |to| {
                to.fallocate(&path, at, 16_384, FallocateOp::PunchHole)
            })],
            7..9 => {
                let from = files[(index + 1) % files.len()].clone();
                let to_at = rng.below(8) * 4096;
                let what = format!("reflink {} to {} {to_at}", show(&from), show(&path));
                vec![Operation::new(what, Some(&path.clone()), move |to| to.copy_range(&from, 0, &path, to_at, 16_384))]
            }
            9 => vec![Operation::new(format!("unlink {}", show(&path)), None, move |to| to.unlink(&path))],
            10 => {
                let mut todo = new("tmp");
                let tmp = format!("tmp-{number}").into_bytes();
                todo.push(Operation::new(format!("rename {} {}", show(&tmp), show(&path)), None, move |to| {
                    to.rename(&tmp, &path, RenameOp::Replace)
                }));
                todo
            }
            11 if has_fsyncs => vec![Operation { what: "sync".to_owned(), partly_changes: None, action: None }],
            _ if has_fsyncs => vec![Operation::fsync(&path)],
            _ => vec![Operation::write(&path, at, &data)],
        };
        if !has_fsyncs {
            todo.retain(|todo| !todo.what.starts_with("fsync"));
        }
        todo
    }

    fn random(&mut self, steps: usize, names_only: bool, shared: &Shared) -> Result<()> {
        let mut driver = Driver::new(self.rng.next_u64(), 1 << 15);
        if names_only {
            driver = driver.names_only();
        }
        for _ in 0..steps {
            let mut model = self.history.model().clone();
            let target = &mut self.target;
            match caught(|| driver.run(&mut model, target, 1)) {
                Some(Ok(_)) => self.note(model, shared),
                failed => {
                    let text = failed.and_then(Result::err).map_or_else(String::new, |error| format!("{error:#}"));
                    self.failed(&text, None, model, shared)?;
                    return Ok(());
                }
            }
            if self.rng.one_in(6) {
                let entries = self.history.model().entries();
                let entry = &entries[self.rng.index(entries.len())];
                if matches!(entry.kind, NodeKind::File | NodeKind::Directory) {
                    let path = entry.path.clone();
                    if !matches!(self.act("fsync", &|to| to.fsync(&path), shared)?, Done::Fine) {
                        return Ok(());
                    }
                }
            }
            if self.rng.one_in(steps as u64 / 4) && !matches!(self.sync(shared)?, Done::Fine) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn fill(&mut self, steps: usize, shared: &Shared) -> Result<()> {
        let mut files: Vec<String> = Vec::new();
        let mut to_remove = 0;
        for number in 0..steps {
            let mut model = self.history.model().clone();
            if to_remove > 0 && !files.is_empty() && self.rng.one_in(2) {
                let path = files.swap_remove(self.rng.index(files.len()));
                to_remove -= 1;
                match self.act("unlink", &|to| to.unlink(path.as_bytes()), shared)? {
                    Done::Fine => {}
                    Done::Full(_) | Done::Told => return Ok(()),
                }
            } else {
                let path = format!("file-{number}");
                let bytes = path.as_bytes();
                let len = 50_000 + self.rng.index(400_000);
                let data = self.rng.bytes(len);
                match self.act("create", &|to| to.create(bytes, NodeKind::File, 0o644, (0, 0)), shared)? {
                    Done::Fine => {}
                    Done::Full(_) => {
                        to_remove = 3;
                        continue;
                    }
                    Done::Told => return Ok(()),
                }
                model.create(bytes, NodeKind::File, 0o644, (0, 0)).map_err(errno)?;
                let mut size = 0;
                let written = caught(|| {
                    let written = self.target.write(bytes, 0, &data);
                    // A part of the data may have been written: the file's size tells how much.
                    size = self.target.inner.lookup(format!("lane-{}/{path}", self.number).as_bytes())?.size;
                    written
                });
                match written {
                    Some(Ok(())) => {}
                    Some(Err(NOSPC)) => to_remove = 3,
                    failed => {
                        let _predicted = model.write(bytes, 0, &data);
                        self.failed("fill", failed.and_then(Result::err), model, shared)?;
                        return Ok(());
                    }
                }
                let len = usize::try_from(size)?.min(data.len());
                model.write(bytes, 0, &data[..len]).map_err(errno)?;
                files.push(path);
                self.note(model, shared);
            }
            let path = (!files.is_empty()).then(|| self.rng.pick(&files).clone());
            let result = match (self.rng.below(8), &path) {
                (0, _) => caught(|| self.target.sync()),
                (1..4, Some(path)) => caught(|| self.target.fsync(path.as_bytes())),
                _ => continue,
            };
            match result {
                Some(Ok(())) => self.note(self.history.model().clone(), shared),
                Some(Err(number)) if self.faults.is_none() => bail!("a sync fails: errno {number}"),
                other => {
                    let number = other.and_then(Result::err);
                    self.failed("sync", number, self.history.model().clone(), shared)?;
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// Whether the operation `what` must never fail for lack of space (T6), because the operation frees space or stores
/// accepted data.
fn must_have_space(what: &str) -> bool {
    ["unlink", "fsync", "sync"].iter().any(|kind| what.starts_with(kind))
}
