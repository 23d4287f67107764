//! The directories on the way to the directory that a copy used last, so that the next directory, which is usually near,
//! is not looked up from the top. A copy of deeply nested directories would otherwise take time that grows with the
//! square of the depth.

/// Directories on one path, from the outside to the inside. `T` is an open directory.
pub(super) struct DirChain<T> {
    /// The path of the innermost directory, as the caller wrote it.
    path: Vec<u8>,
    /// Directories on the path, each with the length of its path. After [`DirChain::thin`], some are missing.
    dirs: Vec<(usize, T)>,
    /// The largest number of directories.
    max: usize,
}

impl<T: Clone> DirChain<T> {
    pub(super) fn new(max: usize) -> Self {
        Self { path: Vec::new(), dirs: Vec::new(), max }
    }

    /// Finds a directory. If an outer directory is known, `step` enters each name on the rest of the path. If no outer
    /// directory is known, if a name is `.` or `..`, or if `step` returns `None`, `from_top` finds the directory.
    pub(super) fn find<E>(
        &mut self,
        dir: &[u8],
        step: impl Fn(&T, &[u8]) -> Result<Option<T>, E>,
        from_top: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.cut_to_outside_of(dir);
        match self.descend(dir, step) {
            Ok(Some(found)) => Ok(found),
            Ok(None) => {
                let found = from_top()?;
                self.dirs.clear();
                self.dirs.push((dir.len(), found.clone()));
                self.path.clear();
                self.path.extend(dir);
                Ok(found)
            }
            Err(error) => {
                self.dirs.clear();
                Err(error)
            }
        }
    }

    /// Forgets directories that `dir` is not inside of. Afterwards, each known directory is `dir` or outside of it.
    fn cut_to_outside_of(&mut self, dir: &[u8]) {
        let equal = match () {
            () if dir.starts_with(&self.path) => self.path.len(),
            () if self.path.starts_with(dir) => dir.len(),
            () => self.path.iter().zip(dir).take_while(|(one, other)| one == other).count(),
        };
        let is_outside = |len: usize| len <= equal && (len == dir.len() || dir.get(len) == Some(&b'/'));
        while self.dirs.last().is_some_and(|(len, _)| !is_outside(*len)) {
            self.dirs.pop();
        }
    }

    fn descend<E>(&mut self, dir: &[u8], step: impl Fn(&T, &[u8]) -> Result<Option<T>, E>) -> Result<Option<T>, E> {
        let Some((mut len, mut at)) = self.dirs.last().cloned() else { return Ok(None) };
        self.path.truncate(len);
        while len < dir.len() {
            let name = dir[len + 1..].split(|byte| *byte == b'/').next().unwrap_or_default();
            if matches!(name, b"" | b"." | b"..") {
                return Ok(None);
            }
            let Some(next) = step(&at, name)? else { return Ok(None) };
            self.path.extend(&dir[len..len + 1 + name.len()]);
            len += 1 + name.len();
            at = next;
            self.dirs.push((len, at.clone()));
            self.thin();
        }
        Ok(Some(at))
    }

    /// If there are too many directories, forgets every second one, except for the innermost half. A way back to the
    /// outside then enters the forgotten directories anew, in pieces.
    fn thin(&mut self) {
        if self.dirs.len() > self.max {
            let outer = self.dirs.len() / 2;
            let mut index = 0;
            self.dirs.retain(|_| {
                index += 1;
                index > outer || index % 2 == 1
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Finds directories, which are their own paths, and counts the names that are entered.
    fn find(chain: &mut DirChain<String>, dir: &str, nr_steps: &Cell<usize>) -> String {
        let step = |at: &String, name: &[u8]| {
            nr_steps.set(nr_steps.get() + 1);
            let name = std::str::from_utf8(name).unwrap();
            Ok::<_, ()>((name != "link").then(|| format!("{at}/{name}")))
        };
        let from_top = || {
            nr_steps.set(nr_steps.get() + dir.matches('/').count());
            Ok(dir.to_owned())
        };
        chain.find(dir.as_bytes(), step, from_top).unwrap()
    }

    #[test]
    fn every_directory_is_found() {
        let mut chain = DirChain::new(4);
        let dirs =
            ["/a", "/a/b", "/a/b/c/d/e/f/g", "/a/b/c", "/ab", "/ab/link/x", "/ab/../x", "/a/b/cc", "", "/a/b//c"];
        for dir in dirs.iter().cycle().take(40) {
            assert_eq!(find(&mut chain, dir, &Cell::new(0)), *dir);
        }
    }

    #[test]
    fn the_way_down_a_chain_and_back_takes_few_steps() {
        const DEPTH: usize = 20_000;
        let mut chain = DirChain::new(256);
        let nr_steps = Cell::new(0);
        for depth in (1..=DEPTH).chain((1..DEPTH).rev()) {
            let dir = "/d".repeat(depth);
            assert_eq!(find(&mut chain, &dir, &nr_steps), dir);
            assert!(chain.dirs.len() <= 256);
        }
        assert!(nr_steps.get() < 20 * DEPTH, "{}", nr_steps.get());
    }
}
