//! Lists the tensors of a `torch.nn.Module`. A model may have more modules than tensors.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};

/// The deepest nesting of modules that is visited. torch recurses as well, and fails earlier, at Python's limit.
const MAX_DEPTH: usize = 500;

/// Return the parameters and persistent buffers by name. See `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (module, is_ordinary, versions = None))]
pub(crate) fn module_tensors<'py>(
    module: &Bound<'py, PyAny>,
    is_ordinary: &Bound<'py, PyAny>,
    versions: Option<&Bound<'py, PyDict>>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    let mut walk = Walk {
        found: PyDict::new(module.py()),
        versions,
        is_ordinary,
        ordinary: Vec::new(),
        name: String::new(),
    };
    Ok(walk.visit(module, 0)?.then_some(walk.found))
}

struct Walk<'a, 'py> {
    found: Bound<'py, PyDict>,
    /// Gets the version of each module, as `state_dict` returns it.
    versions: Option<&'a Bound<'py, PyDict>>,
    is_ordinary: &'a Bound<'py, PyAny>,
    /// The classes that `is_ordinary` accepted.
    ordinary: Vec<Bound<'py, PyType>>,
    /// The name of the current module and a dot; empty for the first.
    name: String,
}

impl<'py> Walk<'_, 'py> {
    /// Add the tensors of a module and of the modules in it. Return whether all of them are ordinary.
    fn visit(&mut self, module: &Bound<'py, PyAny>, depth: usize) -> PyResult<bool> {
        let py = module.py();
        if depth > MAX_DEPTH || !self.has_ordinary_class(module)? {
            return Ok(false);
        }
        let own = module.getattr(intern!(py, "__dict__"))?.cast_into::<PyDict>()?;
        for name in [
            intern!(py, "_state_dict_hooks"),
            intern!(py, "_state_dict_pre_hooks"),
        ] {
            if !own
                .get_item(name)?
                .is_some_and(|hooks| hooks.is_truthy().is_ok_and(|any| !any))
            {
                return Ok(false);
            }
        }
        for name in [
            intern!(py, "state_dict"),
            intern!(py, "_save_to_state_dict"),
            intern!(py, "get_extra_state"),
        ] {
            if own.contains(name)? {
                return Ok(false);
            }
        }
        let dicts = [
            intern!(py, "_parameters"),
            intern!(py, "_buffers"),
            intern!(py, "_modules"),
        ];
        let [parameters, buffers, modules] =
            dicts.map(|name| own.get_item(name).ok().flatten()?.cast_into::<PyDict>().ok());
        let (Some(parameters), Some(buffers), Some(modules)) = (parameters, buffers, modules) else {
            return Ok(false);
        };
        self.add_version(module)?;
        let passing = match buffers.is_empty() {
            true => None,
            false => own.get_item(intern!(py, "_non_persistent_buffers_set"))?,
        };
        Ok(self.add(&parameters, None)?
            && self.add(&buffers, passing.as_ref())?
            && self.descend(&modules, depth)?)
    }

    fn has_ordinary_class(&mut self, module: &Bound<'py, PyAny>) -> PyResult<bool> {
        let class = module.get_type();
        if self.ordinary.iter().any(|known| known.is(&class)) {
            return Ok(true);
        }
        let is_ordinary = self.is_ordinary.call1((&class,))?.is_truthy()?;
        if is_ordinary {
            self.ordinary.push(class);
        }
        Ok(is_ordinary)
    }

    fn add_version(&self, module: &Bound<'py, PyAny>) -> PyResult<()> {
        let Some(versions) = self.versions else {
            return Ok(());
        };
        let (py, path) = (module.py(), self.name.strip_suffix('.').unwrap_or(&self.name));
        let version = PyDict::new(py);
        version.set_item(intern!(py, "version"), module.getattr(intern!(py, "_version"))?)?;
        versions.set_item(path, version)
    }

    /// Add the tensors whose names are not in `passing`.
    fn add(&mut self, tensors: &Bound<'py, PyDict>, passing: Option<&Bound<'py, PyAny>>) -> PyResult<bool> {
        for (name, tensor) in tensors {
            if tensor.is_none() || passing.map_or(Ok(false), |passing| passing.contains(&name))? {
                continue;
            }
            let Some(end) = self.enter(&name) else {
                return Ok(false);
            };
            self.found
                .set_item(PyString::new(name.py(), &self.name), tensor)?;
            self.name.truncate(end);
        }
        Ok(true)
    }

    fn descend(&mut self, modules: &Bound<'py, PyDict>, depth: usize) -> PyResult<bool> {
        for (name, module) in modules {
            if module.is_none() {
                continue;
            }
            let Some(end) = self.enter(&name) else {
                return Ok(false);
            };
            self.name.push('.');
            if !self.visit(&module, depth + 1)? {
                return Ok(false);
            }
            self.name.truncate(end);
        }
        Ok(true)
    }

    /// Append `name` to the current name, and return the length before; `None` if it is no valid text.
    fn enter(&mut self, name: &Bound<'py, PyAny>) -> Option<usize> {
        let end = self.name.len();
        self.name.push_str(name.cast::<PyString>().ok()?.to_str().ok()?);
        Some(end)
    }
}
