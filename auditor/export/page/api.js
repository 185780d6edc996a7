// The auditor's read API. A token, where one is wanted, is kept for this tab only.

const KEY = "auditor-token";

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** JSON of /api/v1 + path. */
export async function get(path, parameters = {}) {
  return (await answerOf(path, parameters)).json();
}

/** The bytes at /api/v1 + path, offered as a file. A link alone could not carry the token. */
export async function save(path, name) {
  const url = URL.createObjectURL(await (await answerOf(path, {})).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

async function answerOf(path, parameters) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null && value !== ""));
  const token = sessionStorage.getItem(KEY);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let answer;
  try {
    answer = await fetch(`/api/v1${path}${query.size ? `?${query}` : ""}`, { headers });
  } catch {
    throw new ApiError(0, "the auditor does not answer");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  throw new ApiError(answer.status, problem.detail || `the auditor answers ${answer.status} ${answer.statusText}`);
}

export const setToken = (token) => sessionStorage.setItem(KEY, token);
export const runPath = (run) => `/runs/${encodeURIComponent(run)}`;
